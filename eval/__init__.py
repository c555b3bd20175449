"""How good an agent is: episodes over a dataset, official grading, a report that a reviewer accepts."""
