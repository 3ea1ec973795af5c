//! Memory of the host that programs allocate: a file of both sides, where files go over the connection; a part of the window, where there is one;
//! else the program's own, which is copied as all of that is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_bridge::wire::{WINDOW, code, control, put};

use super::{current_device, managed_at, registered_at, shared_at, the};
use crate::client::{Client, Registered, client, locked};
use crate::sys::{caller, window};
use crate::{forward, mapped};

const PAGE: u64 = 4096;
/// `CU_MEMHOSTALLOC_DEVICEMAP`.
pub(super) const DEVICE_MAP: u32 = 2;

/// Allocates memory of the host.
fn host_allocate(to: usize, len: usize, flags: u32) -> Result<(), u32> {
    if to == 0 || len == 0 || flags & !7 != 0 {
        return Err(code::INVALID_VALUE);
    }
    let client = client()?;
    let at = match on_both(&client, len, flags)? {
        Some(at) => at,
        None if flags & DEVICE_MAP != 0 => return Err(code::NOT_SUPPORTED),
        None => own(&client, pages(len)?, flags)?,
    };
    caller::write(to, at);
    Ok(())
}

fn pages(len: usize) -> Result<u64, u32> {
    (len as u64).checked_next_multiple_of(PAGE).ok_or(code::OUT_OF_MEMORY)
}

/// Allocates memory that both sides have at one address, or returns `None` where the two share none.
pub(super) fn on_both(client: &Arc<Client>, len: usize, flags: u32) -> Result<Option<u64>, u32> {
    let len = pages(len)?;
    if client.token.is_none() {
        return share(client, len, flags, 0, |at| window::make(at, len).map(Some)).map(Some);
    }
    of_window(client, len, flags)
}

/// Frees what [`on_both`] has allocated.
pub(super) fn free_on_both(client: &Arc<Client>, at: u64) -> Result<(), u32> {
    end_share(client, the("cuMemFreeHost")?, at, false)?;
    let part = locked(&client.parts).remove(&at);
    part.map_or(Ok(()), |offset| client.order([control::GIVE, offset, 0, 0], None))
}

/// Memory at an address that is free on both sides, which `make` makes there. Answers with where.
fn share(
    client: &Arc<Client>,
    len: u64,
    flags: u32,
    offset: u64,
    make: impl Fn(u64) -> io::Result<Option<OwnedFd>>,
) -> Result<u64, u32> {
    /// Places that are tried: another library may have taken one.
    const TRIES: u32 = 64;
    let mut from = client.next_place.load(Ordering::Relaxed);
    for _ in 0..TRIES {
        let found = place(client, from, len).or_else(|| place(client, WINDOW.start, len));
        let at = found.ok_or(code::OUT_OF_MEMORY)?;
        let file = match make(at) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                client.give_window_up("it is not the server's");
                return Err(code::OUT_OF_MEMORY);
            }
            Err(_) => {
                // Something else has it.
                from = at + len;
                continue;
            }
        };
        if at < from {
            // From the first place on again.
            client.next_place.store(at + len, Ordering::Relaxed);
        } else {
            client.next_place.fetch_max(at + len, Ordering::Relaxed);
        }
        locked(&client.windows).insert(at, len);
        let mut payload = Vec::new();
        put(&mut payload, at);
        put(&mut payload, flags.into());
        let made = client
            .order([control::WINDOW, at, len, offset], file.as_ref().map(AsFd::as_fd))
            .and_then(|()| client.ask(the("cuMemHostAlloc")?, &payload, false));
        return match made {
            Ok(_) => Ok(at),
            Err(code) => {
                locked(&client.windows).remove(&at);
                window::free(at, len);
                Err(code)
            }
        };
    }
    Err(code::OUT_OF_MEMORY)
}

/// Shares memory that the program has mapped from a file, where files go over the connection: where `start` is on both sides.
pub(crate) fn share_mapped(client: &Arc<Client>, start: u64, end: u64, flags: u32) -> Option<u64> {
    if client.token.is_some() {
        return None;
    }
    let (first, end) = (start / PAGE * PAGE, end.checked_next_multiple_of(PAGE)?);
    let (file, offset) = mapped::file_of(first, end)?;
    let make = |at| {
        window::map(&file, at, offset, end - first)?;
        Ok(Some(file.try_clone()?.into()))
    };
    // Without, it is copied as all memory of the program's own is.
    let shared = share(client, end - first, flags, offset, make).ok()?;
    // Whoever writes where there is no room for a page is ended.
    if !window::populate(shared, end - first) {
        unshare(client, shared, false).ok()?;
        return None;
    }
    Some(shared + (start - first))
}

/// Ends what [`share_mapped`] began. Where its context has ended the driver has let go of it already.
pub(crate) fn unshare(client: &Arc<Client>, shared: u64, has_ended: bool) -> Result<(), u32> {
    end_share(client, the("cuMemFreeHost")?, shared / PAGE * PAGE, has_ended)
}

fn end_share(client: &Arc<Client>, number: usize, at: u64, has_ended: bool) -> Result<(), u32> {
    let len = locked(&client.windows).get(&at).copied().ok_or(code::INVALID_VALUE)?;
    let mut payload = Vec::new();
    put(&mut payload, at);
    put(&mut payload, has_ended.into());
    let ended = client.ask(number, &payload, true);
    if ended.is_ok() || has_ended {
        window::free(at, len);
        locked(&client.windows).remove(&at);
    }
    ended.map(drop)
}

/// The first free place of those addresses from one on.
fn place(client: &Client, from: u64, len: u64) -> Option<u64> {
    let mut at = from;
    for (start, known) in locked(&client.windows).iter() {
        if *start >= at && start - at >= len {
            break;
        }
        at = at.max(start + known);
    }
    (at.checked_add(len)? <= WINDOW.end).then_some(at)
}

/// A part of the window, if there is one.
fn of_window(client: &Arc<Client>, len: u64, flags: u32) -> Result<Option<u64>, u32> {
    let Some(window) = locked(&client.window).clone() else { return Ok(None) };
    let (offset, mark) = client.take(len, false)?;
    let make = |at| {
        window.map(at, offset, len)?;
        // Else the device would be told of other memory.
        if window::take_mark(at) == mark {
            return Ok(None);
        }
        window::free(at, len);
        Err(io::ErrorKind::InvalidData.into())
    };
    match share(client, len, flags, offset, make) {
        Ok(at) => {
            locked(&client.parts).insert(at, offset);
            Ok(Some(at))
        }
        Err(code) => {
            client.order([control::GIVE, offset, 0, 0], None)?;
            Err(code)
        }
    }
}

/// Memory of this program alone, which the device does not reach.
fn own(client: &Client, len: u64, flags: u32) -> Result<u64, u32> {
    current_device()?;
    let at = window::own(len).map_err(|_| code::OUT_OF_MEMORY)?;
    locked(&client.own).insert(at, len);
    locked(&client.registered).insert(at, Registered { len, flags, shared: None, context: 0 });
    Ok(at)
}

pub(crate) fn cuMemHostAlloc(_: usize, words: &[usize]) -> Result<(), u32> {
    host_allocate(words[0], words[1], words[2] as u32)
}

pub(crate) fn cuMemAllocHost_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    host_allocate(words[0], words[1], 0)
}

pub(crate) fn cuMemFreeHost(_: usize, words: &[usize]) -> Result<(), u32> {
    let (client, at) = (client()?, words[0] as u64);
    let own = locked(&client.own).remove(&at);
    if let Some(len) = own {
        locked(&client.registered).remove(&at);
        window::free(at, len);
        return Ok(());
    }
    let is_registered = |memory: &Registered| memory.shared.is_some_and(|shared| shared / PAGE == at / PAGE);
    if locked(&client.registered).values().any(is_registered) || managed_at(&client, at).is_some() {
        return Err(code::INVALID_VALUE);
    }
    free_on_both(&client, at)
}

pub(crate) fn cuMemHostGetDevicePointer_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    let client = client()?;
    if words[0] == 0 || words[2] as u32 != 0 || managed_at(&client, words[1] as u64).is_some() {
        return Err(code::INVALID_VALUE);
    }
    match shared_at(&client, words[1], 1) {
        Some(at) => caller::write(words[0], at as u64),
        None if registered_at(&client, words[1]).is_some() => return Err(code::NOT_SUPPORTED),
        None => return Err(code::INVALID_VALUE),
    }
    Ok(())
}

pub(crate) fn cuMemHostGetFlags(number: usize, words: &[usize]) -> Result<(), u32> {
    let flags = locked(&client()?.registered).get(&(words[1] as u64)).map(|memory| memory.flags);
    match flags {
        Some(flags) => {
            caller::write_half(words[0], flags);
            Ok(())
        }
        None => forward::ask(number, words),
    }
}
