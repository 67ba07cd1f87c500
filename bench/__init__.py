"""Side-by-side measurements: `python -m bench`. README.md says how to read them."""
