"""The maths of one bucket on one rank: accumulate into u and v, select, take, encode and decode."""
