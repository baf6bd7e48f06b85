"""`python -m examples.quickstart`."""

import sys

if __name__ == "__main__":
  try:
    from examples.quickstart.main import main
  except ModuleNotFoundError as error:
    sys.exit(
      f"error: {error.name} is not installed; this installs all: "
      'pip install -e ".[train,plots]"'
    )
  sys.exit(main())
