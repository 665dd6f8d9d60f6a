"""What packets on the wire say of the lanes, independent of our own counters."""
