import pathlib
import sys

# Problems and tolerances are shared with the interpreted tests.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "attention" / "mosaic_gpu"))
