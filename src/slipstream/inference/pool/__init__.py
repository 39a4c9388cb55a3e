"""Replicas: several engines that answer as one.

* ``member.Member``: one replica, its process if it has one, and whether it may be routed to.
* ``pool.ReplicaPool``: starts, watches, restarts and re-syncs the members; the router in front.
* ``engine.PoolEngine``: the pool as an ``Engine``: requests are routed, control calls reach every member.
* ``build.build_pool``: a pool from settings.

Importing this package imports none of them.
"""
