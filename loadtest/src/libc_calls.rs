//! The C library's `getrandom` and `clock_gettime`, asked by all crates of this program: on a simulated thread they answer
//! from its seed and its virtual time, on all others as ever.
//!
//! *Owns*: these two functions.
//! *Does not own*: what a simulated thread is told (`sluice_loadtest::sim::cluster::seeded`).

#![allow(unsafe_code, reason = "functions of the C library are replaced, by their own signatures")]

use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use libc::{c_int, c_long, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};
use sluice_loadtest::sim::cluster::seeded;

type ClockGettime = unsafe extern "C" fn(clockid_t, *mut timespec) -> c_int;

/// The C library's own `clock_gettime`, which asks no kernel. Null until it was looked up.
static CLOCK_GETTIME: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// # Safety
/// As of the C library's function: `at` can be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clock_gettime(clock: clockid_t, at: *mut timespec) -> c_int {
    if !seeded::is_on() {
        // SAFETY: the caller's promise is handed on.
        return unsafe { real_clock_gettime(clock, at) };
    }
    let now: Duration = match clock {
        libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE => seeded::wall_clock(),
        _ => seeded::monotonic_clock(),
    };
    let (seconds, nanoseconds) =
        (now.as_secs().cast_signed(), c_long::from(now.subsec_nanos().cast_signed()));
    // SAFETY: the caller promises that `at` can be written.
    unsafe { at.write(timespec { tv_sec: seconds, tv_nsec: nanoseconds }) };
    0
}

unsafe fn real_clock_gettime(clock: clockid_t, at: *mut timespec) -> c_int {
    let mut real = CLOCK_GETTIME.load(Ordering::Relaxed);
    if real.is_null() {
        // SAFETY: the name ends with a zero.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, c"clock_gettime".as_ptr()) };
        CLOCK_GETTIME.store(real, Ordering::Relaxed);
    }
    if real.is_null() {
        // SAFETY: the kernel's call has the function's arguments.
        return unsafe { libc::syscall(libc::SYS_clock_gettime, clock, at) as c_int };
    }
    // SAFETY: that is what a function of this name is in the C library.
    let real: ClockGettime = unsafe { std::mem::transmute::<*mut c_void, ClockGettime>(real) };
    // SAFETY: the caller's promise is handed on.
    unsafe { real(clock, at) }
}

/// # Safety
/// As of the C library's function: so many bytes at `buffer` can be written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getrandom(buffer: *mut c_void, length: size_t, flags: c_uint) -> ssize_t {
    if !seeded::is_on() {
        // SAFETY: the kernel's call has the function's arguments.
        return unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) as ssize_t };
    }
    if length > 0 {
        // SAFETY: the caller promises that these bytes can be written. Zeros first, since they may never have been.
        let bytes = unsafe {
            std::ptr::write_bytes(buffer.cast::<u8>(), 0, length);
            std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length)
        };
        seeded::fill(bytes);
    }
    length.cast_signed()
}
