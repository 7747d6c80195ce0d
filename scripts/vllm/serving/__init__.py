"""An engine that computes prompts and one that answers them: `bench_serving`."""
