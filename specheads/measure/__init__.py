"""Measuring a head: offline by exact replay, online by decoding, and against the clock."""
