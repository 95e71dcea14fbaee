"""`sgl_kernel.speculative`: one name that a module imports at load time."""

from sgl_kernel._absent import absent

reconstruct_indices_from_tree_mask = absent("speculative.reconstruct_indices_from_tree_mask")
