"""MLA decode on ROCm: which kernel runs a shape. The decode itself joins it here.

Importing needs neither torch, triton nor aiter.
"""

from __future__ import annotations

from k3backend.rocm.decode_routes import Route, RouteRow, choose_route, route_table

__all__ = ["Route", "RouteRow", "choose_route", "route_table"]
