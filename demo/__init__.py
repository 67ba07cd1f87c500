"""The main job on real input: `python -m demo`."""
