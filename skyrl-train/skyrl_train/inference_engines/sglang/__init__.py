"""SGLang's engine: a server, started by the run or by another program, called over its native HTTP interface."""
