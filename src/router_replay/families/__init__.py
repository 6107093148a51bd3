"""Hold one record for each MoE family of transformers, found by folder, model type or class.

Neither torch nor transformers is imported here; `from_modules` needs both.
"""

from router_replay.families.records import FAMILIES, by_class, by_folder, by_model_type, folder_of
from router_replay.families.types import Borders, Choice, ConfigRules, Family, Packing, Where

__all__ = ["FAMILIES", "Borders", "Choice", "ConfigRules", "Family", "Packing", "Where"]
__all__ += ["by_class", "by_folder", "by_model_type", "folder_of"]
