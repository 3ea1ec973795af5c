//! That arguments which can't be are refused, each by itself, before anything is started.

use super::{ARENA, Caller, SHAPES, words};
use crate::sys::by_name::{Entry, Parameter};
use crate::sys::vmk_status;

/// Calls a function with each of its arguments spoilt in every way, one at a time: each call is refused, with a text that names the function
/// that was called, and the parameter where it is one's own fault; no arena is written. `addresses` are memory that the device does not reach, of which the
/// caller knows why; there are such only where a device can tell memory from other addresses, and knows how much of it there is.
/// Tells how many calls that were.
///
/// # Errors
/// The first call that was not refused so.
pub fn refused(caller: &mut dyn Caller, entry: &Entry, addresses: &[(&str, u64)]) -> Result<usize, String> {
    let pattern = vec![0x3c; ARENA];
    let arenas = entry.parameters.iter().filter(|parameter| parameter.is_pointer()).count();
    for arena in 0..arenas {
        caller.write(arena, &pattern)?;
    }
    let given = words(caller, entry, SHAPES[0])?;
    let plain = caller.call(entry.name, &given)?;
    // Without `_ws` some need memory to work in: then all is refused, which proves nothing of it.
    if plain != 0 && caller.last().contains("workspace is needed") && !entry.name.ends_with("_ws") {
        return Ok(0);
    }
    if plain != 0 {
        return Err(format!("{}: {plain}: {}", entry.name, caller.last()));
    }
    for arena in 0..arenas {
        caller.write(arena, &pattern)?;
    }
    let mut calls = 0;
    let mut check = |caller: &mut dyn Caller, at: &[usize], word: u64, what: &str| -> Result<(), String> {
        let mut words = given.clone();
        at.iter().for_each(|at| words[*at] = word);
        let status = caller.call(entry.name, &words)?;
        let said = caller.last();
        let named = match at {
            [at] => said.contains(entry.parameters[*at].name) || entry.parameters[*at].is_extent(),
            _ => true,
        };
        calls += 1;
        if status == vmk_status::VMK_INVALID_VALUE as i32
            && said.starts_with(&format!("{}: ", entry.name))
            && named
        {
            return Ok(());
        }
        let which: Vec<&str> = at.iter().map(|at| entry.parameters[*at].name).collect();
        Err(format!("{}: {what} for {which:?} came to {status}: {said:?}", entry.name))
    };
    let needed = entry
        .parameters
        .iter()
        .position(|parameter| parameter.name == "workspace_bytes")
        .map(|at| (at, given[at]));
    let pointers = entry.parameters.iter().enumerate().filter(|(_, parameter)| parameter.is_pointer());
    let used =
        |parameter: &&Parameter| parameter.name != "workspace" || needed.is_some_and(|(_, bytes)| bytes > 0);
    for (at, parameter) in pointers.filter(|(_, parameter)| used(parameter)) {
        if !parameter.optional {
            check(caller, &[at], 0, "NULL")?;
        }
        let odd = if parameter.is_workspace() { 8 } else { parameter.element() / 2 };
        check(caller, &[at], given[at] + odd, "a misaligned address")?;
        let last = if parameter.is_workspace() { 16 } else { parameter.element() };
        check(caller, &[at], u64::MAX - last + 1, "the last address")?;
        let other = entry.parameters.iter().enumerate().find(|(other, of)| {
            *other != at
                && of.is_pointer()
                && !of.is_workspace()
                && (of.is_written() || parameter.is_written())
        });
        if let Some((other, _)) = other {
            check(caller, &[at], given[other], "an address of another's")?;
        }
        for (what, address) in addresses {
            check(caller, &[at], *address, what)?;
        }
        // All but these have more than one element.
        if !addresses.is_empty() && !["total_norm", "aux_loss"].contains(&parameter.name) {
            check(caller, &[at], given[at] + ARENA as u64 - last, "the arena's last element")?;
        }
    }
    if let Some((at, bytes)) = needed
        && bytes > 0
    {
        check(caller, &[at - 1, at], 0, "no workspace")?;
        let mut words = given.clone();
        words[at] = bytes - 1;
        let status = caller.call(entry.name, &words)?;
        let said = caller.last();
        let plain = entry.name.strip_suffix("_ws").unwrap_or(entry.name);
        let tells = format!(
            "{}: workspace has {} bytes: {bytes} are needed, as {plain}_workspace_size tells",
            entry.name,
            bytes - 1
        );
        if status != vmk_status::VMK_INVALID_VALUE as i32 || said != tells {
            return Err(format!("{}: a byte less to work in came to {status}: {said:?}", entry.name));
        }
    }
    let extents = entry.parameters.iter().enumerate().filter(|(_, parameter)| parameter.is_extent());
    let extents: Vec<(usize, bool)> = extents.map(|(at, parameter)| (at, parameter.kind == "int")).collect();
    for (at, small) in &extents {
        check(caller, &[*at], (-1i64).cast_unsigned(), "-1")?;
        let [least, most] = if *small { [i32::MIN.into(), i32::MAX.into()] } else { [i64::MIN, i64::MAX] };
        check(caller, &[*at], least.cast_unsigned(), "the least number")?;
        // There may be a k that is more than all.
        let free = (entry.function(), entry.parameters[*at].name) == ("cuda_topk_sample", "k");
        if !free && (!addresses.is_empty() || !*small) {
            check(caller, &[*at], most.cast_unsigned(), "the greatest number")?;
        }
    }
    let all: Vec<usize> = extents.iter().map(|(at, _)| *at).collect();
    check(
        caller,
        &all,
        u64::from(i32::MAX.cast_unsigned()) << if extents.iter().all(|(_, small)| *small) { 0 } else { 31 },
        "the greatest number",
    )?;
    let mut bytes = vec![0; ARENA];
    for arena in 0..arenas {
        caller.read(arena, &mut bytes)?;
        if bytes != pattern {
            return Err(format!("{}: a call that was refused wrote", entry.name));
        }
    }
    Ok(calls)
}
