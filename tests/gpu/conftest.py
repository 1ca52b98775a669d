import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "transfer"))  # shared_engine
sys.path.insert(0, str(Path(__file__).parent))  # gpu_engine
