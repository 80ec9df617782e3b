"""The SGLang engine: a server, started by the run or separately, called over its native HTTP API."""
