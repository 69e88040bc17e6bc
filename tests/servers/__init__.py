"""Servers on loopback that stores are tested against: S3 (moto behind a proxy), the Hub, plain web servers; with faults."""
