"""vLLM engines with their own copy of the policy's weights: in this process, in other processes, or behind HTTP."""
