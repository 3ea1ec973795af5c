//! Network interfaces, and data over TCP.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::data::{check_pattern, pattern};
use super::{Function, sys, wait_until};
use crate::provision::fnv1a;

const TIMEOUT: Duration = Duration::from_secs(30);

/// The network interface of a function, when its driver has made it.
///
/// # Errors
/// When it does not appear.
pub fn interface_of(function: &Function) -> Result<String> {
    wait_until(&format!("the network interface of {}", function.address), TIMEOUT, || {
        let entry = fs::read_dir(function.path().join("net")).ok()?.flatten().next()?;
        entry.file_name().into_string().ok()
    })
}

/// Makes a tap.
///
/// # Errors
/// When the Linux kernel refuses.
pub fn make_tap(name: &str) -> Result<()> {
    sys::make_tap(name).with_context(|| format!("can't make the tap {name}"))
}

/// The network interface with an address, when its driver has made it.
///
/// # Errors
/// When it does not appear.
pub fn interface_with(mac: &str) -> Result<String> {
    wait_until(&format!("the network interface {mac}"), TIMEOUT, || {
        let mut entries = fs::read_dir("/sys/class/net").ok()?.flatten();
        let has_mac =
            |path: PathBuf| fs::read_to_string(path.join("address")).is_ok_and(|is| is.trim() == mac);
        entries.find(|entry| has_mac(entry.path()))?.file_name().into_string().ok()
    })
}

/// Gives an interface its address in a network of 24 bits, and turns it and the loopback on.
///
/// # Errors
/// When the Linux kernel refuses, or the link does not come up.
pub fn set_up(interface: &str, address: Ipv4Addr) -> Result<()> {
    sys::set_interface_address(interface, address, Ipv4Addr::new(255, 255, 255, 0))
        .with_context(|| format!("can't give {interface} the address {address}"))?;
    turn_on(interface)?;
    wait_until(&format!("the link of {interface}"), TIMEOUT, || {
        let carrier = fs::read_to_string(format!("/sys/class/net/{interface}/carrier")).ok()?;
        (carrier.trim() == "1").then_some(())
    })
}

/// Turns an interface on, as `ip link set up` does.
///
/// # Errors
/// When the Linux kernel refuses.
pub fn turn_on(interface: &str) -> Result<()> {
    sys::turn_interface_on(interface).with_context(|| format!("can't turn {interface} on"))
}

/// Waits for one connection, receives `len` bytes of the pattern `theirs` and answers with as many of `ours`; both
/// checksums, received and sent.
///
/// # Errors
/// When nobody connects within `timeout`, or the data is not the pattern.
pub fn serve_once(
    listener: &TcpListener,
    timeout: Duration,
    len: usize,
    theirs: u64,
    ours: u64,
) -> Result<(u64, u64)> {
    listener.set_nonblocking(true)?;
    let (mut stream, _) = wait_until("a connection", timeout, || listener.accept().ok())?;
    stream.set_nonblocking(false)?;
    let received = receive(&mut stream, theirs, len)?;
    let sent = send(&mut stream, ours, len)?;
    Ok((received, sent))
}

/// Connects, sends `len` bytes of the pattern `ours` and receives as many of `theirs`; both checksums, sent and
/// received.
///
/// # Errors
/// When the peer does not answer, or the data is not the pattern.
pub fn exchange(peer: SocketAddrV4, len: usize, ours: u64, theirs: u64) -> Result<(u64, u64)> {
    let start = Instant::now();
    let mut stream = loop {
        match TcpStream::connect_timeout(&peer.into(), Duration::from_secs(3)) {
            Ok(stream) => break stream,
            Err(error) => ensure!(start.elapsed() < TIMEOUT, "can't connect to {peer}: {error}"),
        }
    };
    let sent = send(&mut stream, ours, len)?;
    let received = receive(&mut stream, theirs, len)?;
    Ok((sent, received))
}

fn send(stream: &mut TcpStream, seed: u64, len: usize) -> Result<u64> {
    let bytes = pattern(seed, len);
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(&bytes).context("can't send")?;
    Ok(fnv1a(&bytes))
}

fn receive(stream: &mut TcpStream, seed: u64, len: usize) -> Result<u64> {
    let mut bytes = vec![0; len];
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.read_exact(&mut bytes).context("can't receive")?;
    check_pattern("what was received", seed, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_exchanged_and_checked() {
        for (theirs, right) in [(2, true), (3, false)] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            let server = std::thread::spawn(move || serve_once(&listener, TIMEOUT, 100_000, 1, 2));
            let got = exchange(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port), 100_000, 1, theirs);
            assert_eq!(got.is_ok(), right);
            let (received, sent) = server.join().unwrap().unwrap();
            if let Ok(got) = got {
                assert_eq!(got, (received, sent));
            }
        }
    }
}
