"""Servers on loopback that stores are tested against: object stores, the Hub, web servers; with faults."""
