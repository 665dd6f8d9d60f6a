"""One pure state machine per role: storage server, KV index, node DRAM, PE, DE, group leader, scheduler, agent driver."""
