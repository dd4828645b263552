"""How attention is computed. `plain` is torch alone: any device, compiles, exports, differentiates twice."""
