"""Print the `dev` dependency group of pyproject.toml, one word per requirement, for a pip without `--group`."""

import pathlib
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parent.parent / "pyproject.toml").read_text())
print(*(requirement.replace(" ", "") for requirement in project["dependency-groups"]["dev"]))
