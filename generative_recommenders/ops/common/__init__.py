"""What several ops build on: norms, column sums, Philox decisions and launches of row kernels; no op of its own."""
