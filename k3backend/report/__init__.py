"""What people and programs read: tables, JSON and pictures of plans, routes and kernels."""
