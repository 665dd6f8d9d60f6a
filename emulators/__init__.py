"""One pure state machine per role: storage server, KV index, node DRAM, PE, DE, leader, scheduler, agent driver."""
