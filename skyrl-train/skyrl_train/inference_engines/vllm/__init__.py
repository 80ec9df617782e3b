"""vLLM's engines, which generate with copies of the policy's weights: in this process, in others, or behind HTTP."""
