"""Speed and memory: what attention costs on this machine, as ratios measured side by side."""
