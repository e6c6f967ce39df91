"""Applies recipes of RECIPES.md to a copy of ppg_procgen.py.

    python benchmark/recipe.py                                                # lists the recipes
    python benchmark/recipe.py "Read vectors" "Add memory" -o my_ppg.py
    python benchmark/recipe.py "Store more in B" --base my_ppg.py -o other.py # a file with changes of your own

A recipe brings those that it builds on. The first line of the new file names the recipes in it.
"""

import argparse
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER.parent / "ppg_procgen.py"
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


def apply(*names: str, base: Path = SCRIPT) -> str:
    """The text of a file with recipes, which are applied in the order of RECIPES.md. The file may have some already."""
    source = base.read_text(encoding="utf-8")
    head = re.match("# Recipes: (.*)\n", source)
    old = set(head[1].split("; ")) if head else set()
    new = set().union(*map(with_bases, names)) - old
    titles = [title for title in RECIPES if title in old | new]
    for title in titles:
        for condition, hunk in re.findall(r"^(?:```diff|@@)(.*)\n((?:[-+ ].*\n|\n)+)", RECIPES[title], re.M):
            needed = {title, condition.removeprefix(" with ") or title}
            if not needed <= old | new or needed <= old:
                continue
            before = "\n" + re.sub(r"^\+.*\n|^[- ]", "", hunk, flags=re.M)
            after = "\n" + re.sub(r"^-.*\n|^[+ ]", "", hunk, flags=re.M)
            if source.count(before) != 1:
                lines = before[1:].splitlines()
                line = next((x for x in lines if x not in source.splitlines()), lines[0]).strip()
                fail(f'"{title}" does not fit: not, or not once, in the file: {line}')
            source = source.replace(before, after)
    return f"# Recipes: {'; '.join(titles)}\n" + source.removeprefix(head[0] if head else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*")
    parser.add_argument("--base", type=Path, default=SCRIPT, help="the file to change (default: ppg_procgen.py)")
    parser.add_argument("-o", "--output", type=Path, default="my_ppg.py", help="the new file (default: my_ppg.py)")
    args = parser.parse_args()
    for title, text in RECIPES.items() if not args.recipe else ():
        print(f"{title:36}{text.splitlines()[0]}")
    if args.recipe:
        if args.output.exists():
            fail(f"{args.output} exists")
        args.output.write_text(apply(*args.recipe, base=args.base), encoding="utf-8")
        print(f"wrote {args.output}")
