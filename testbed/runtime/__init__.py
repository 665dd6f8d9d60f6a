"""Running a cluster: what a run needs (``plan``), what it yields (``result``), and the live run itself."""
