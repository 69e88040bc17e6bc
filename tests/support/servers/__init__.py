"""Servers on loopback that stores are tested against: S3 (moto behind a proxy), the Hub, web servers; with faults."""
