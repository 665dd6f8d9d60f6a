"""Many runs of one scenario, and one table of them."""
