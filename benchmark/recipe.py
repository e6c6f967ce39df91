"""Applies recipes of RECIPES.md to a fresh copy of ppg_procgen.py.

    python benchmark/recipe.py                                                # lists the recipes
    python benchmark/recipe.py "Read vectors" "Add memory" -o my_ppg.py

A recipe brings those that it builds on.
"""

import argparse
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PARTS = re.split(r"^##+ (.*)\n+", (FOLDER / "RECIPES.md").read_text(encoding="utf-8"), flags=re.M)[1:]
RECIPES = {title: text for title, text in zip(PARTS[::2], PARTS[1::2], strict=True) if "```diff" in text}


def fail(message: str) -> None:
    print(f"recipe.py: {message}", file=sys.stderr)
    sys.exit(2)


def with_bases(name: str) -> set[str]:
    """The titles of a recipe and of those it builds on."""
    title = next((title for title in RECIPES if title.lower() == name.lower()), None)
    if title is None:
        fail(f'there is no recipe "{name}": without names, the command lists them')
    return {title}.union(*map(with_bases, re.findall(r"^Builds on \[(.*?)\]", RECIPES[title], re.M)))


def apply(*names: str) -> str:
    """The text of ppg_procgen.py with recipes, which are applied in the order of RECIPES.md."""
    chosen = set().union(*map(with_bases, names))
    source = (FOLDER.parent / "ppg_procgen.py").read_text(encoding="utf-8")
    for title in [title for title in RECIPES if title in chosen]:
        for condition, hunk in re.findall(r"^(?:```diff|@@)(.*)\n((?:[-+ ].*\n|\n)+)", RECIPES[title], re.M):
            if condition and condition.removeprefix(" with ") not in chosen:
                continue
            before = "\n" + re.sub(r"^\+.*\n|^[- ]", "", hunk, flags=re.M)
            after = "\n" + re.sub(r"^-.*\n|^[+ ]", "", hunk, flags=re.M)
            if source.count(before) != 1:
                lines = before[1:].splitlines()
                line = next((x for x in lines if x not in source.splitlines()), lines[0]).strip()
                fail(f'"{title}" does not fit: not, or not once, in the file: {line}')
            source = source.replace(before, after)
    return source


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*")
    parser.add_argument("-o", "--output", type=Path, default="my_ppg.py", help="the new file (default: my_ppg.py)")
    args = parser.parse_args()
    for title, text in RECIPES.items() if not args.recipe else ():
        print(f"{title:36}{text.splitlines()[0]}")
    if args.recipe:
        if args.output.exists():
            fail(f"{args.output} exists")
        args.output.write_text(apply(*args.recipe), encoding="utf-8")
