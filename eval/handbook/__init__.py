"""The parts of the documentation that are made from the code: flags, patches, figures. `python -m eval.handbook` writes them."""
