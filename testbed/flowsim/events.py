"""Kinds of events of the flow simulation."""

ARRIVE = 0  # agent: its next round is sent
TICK = 1  # groups pull
READ_DONE = 2  # request: its hits are in DRAM
PUMP_MEMORY = 3  # node: a request has joined its queue for pages
STEP_END = 4  # PE: a layer step has been computed
FORWARD_END = 5  # PE
CHUNK_FLUSHED = 6  # request: the next chunk may load what earlier ones computed
BUFFERED = 7  # request: its whole prompt KV is in the DE buffer
JOIN = 8  # request: its KV is in HBM
BOUNDARY = 9  # DE: a decode step ends at which sequences join or leave
COMPLETE = 10  # request: all tokens emitted, all blocks durable
