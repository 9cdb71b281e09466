"""What training runs wrote: logs, scalar stores, traces, snapshots, read into one row per run."""
