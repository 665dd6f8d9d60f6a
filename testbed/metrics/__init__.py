"""What a run amounts to, from what it left behind: metrics, traffic ledger, verdict. Pure: no I/O, no clock."""
