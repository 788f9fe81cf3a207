//! The pods that a gateway can see.
