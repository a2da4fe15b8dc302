"""Evaluation: benchmark suites, contained execution, pass@k, perplexity."""
