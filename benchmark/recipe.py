"""Applies recipes of RECIPES.md, and those they build on, to a fresh copy of ppg_procgen.py.

python benchmark/recipe.py                                                # lists the recipes
python benchmark/recipe.py "Read vectors" "Add memory" -o my_ppg.py
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
    bases = re.findall(r"^Builds on \[(.*?)\]", RECIPES[title], re.M)
    return {title}.union(*map(with_bases, bases))


def apply(*names: str) -> str:
    """The text of ppg_procgen.py with recipes. They are applied in the order of RECIPES.md. A block marked
    `diff with TITLE` belongs to copies that have that recipe, too."""
    chosen = set().union(*map(with_bases, names))
    source = (FOLDER.parent / "ppg_procgen.py").read_text(encoding="utf-8")
    for title in [title for title in RECIPES if title in chosen]:
        for other, block in re.findall(r"^```diff(?: with ([^\n]*))?\n(.*?)^```", RECIPES[title], re.M | re.S):
            if other and other not in chosen:
                continue
            lines = block.splitlines(keepends=True)
            before, after = (
                "".join(line[1:] or "\n" for line in lines if line[0] in kept) for kept in ("- \n", "+ \n")
            )
            if source.count("\n" + before) != 1:
                fail(f'"{title}" does not fit: not, or not once, in the file: {before.strip().splitlines()[0].strip()}')
            source = source.replace("\n" + before, "\n" + after)
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="recipe")
    parser.add_argument("-o", "--output", type=Path, default="my_ppg.py", help="the new file (default: my_ppg.py)")
    args = parser.parse_args()
    if not args.names:
        for title, text in RECIPES.items():
            print(f"{title:36}{text.splitlines()[0]}")
        return
    source = apply(*args.names)
    try:
        with open(args.output, "x", encoding="utf-8") as file:
            file.write(source)
    except FileExistsError:
        fail(f"{args.output} exists")


if __name__ == "__main__":
    main()
