"""How attention is computed. `plain` is torch alone: it runs on any device, compiles, exports and differentiates twice."""
