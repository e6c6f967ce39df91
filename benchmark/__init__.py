# A package with this file comes before others of its name that are installed.
import sys


def require(condition: object, message: str) -> None:
    if not condition:
        print(f"{sys.argv[0].rpartition('/')[2]}: {message}", file=sys.stderr)
        sys.exit(2)
