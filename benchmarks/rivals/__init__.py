"""The methods that PDP is compared with, each as a mask policy written from the method's equations."""
