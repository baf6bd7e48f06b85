"""One file per model and size; see `configs/README.md`."""
