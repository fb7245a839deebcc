"""kvferry.testing"""
