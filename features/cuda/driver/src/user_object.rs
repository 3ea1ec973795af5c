//! Objects of the program's that graphs keep: what each ends with is called when nobody keeps it any more.

use crate::{
    error::{Error, Result},
    state::{self, State},
    sys::HostFunction,
};
use std::collections::BTreeMap;

/// How often a graph keeps objects.
pub(crate) type Kept = BTreeMap<u64, u32>;
/// Functions to be called with the state unlocked.
pub(crate) type Ended = Vec<(HostFunction, u64)>;

pub(crate) struct UserObject {
    function: HostFunction,
    data: u64,
    count: u32,
}

/// Calls what objects end with.
pub(crate) fn end(ended: Ended) {
    ended.into_iter().for_each(|(function, data)| function(data));
}

/// The same by a thread of its own, as the caller has locked the state.
pub(crate) fn end_later(ended: Ended) {
    if !ended.is_empty() {
        std::thread::spawn(|| end(ended));
    }
}

impl UserObject {
    /// One that one graph keeps.
    pub(crate) fn new(function: HostFunction, data: u64) -> Self {
        Self { function, data, count: 1 }
    }
}

impl State {
    /// Gives references up.
    fn let_object_go(&mut self, id: u64, count: u32, ended: &mut Ended) {
        let Some(object) = self.user_objects.get_mut(&id) else { return };
        object.count = object.count.saturating_sub(count);
        if object.count == 0 {
            ended.push((object.function, object.data));
            self.user_objects.remove(&id);
        }
    }

    /// Gives all up that a graph keeps.
    pub(crate) fn let_objects_go(&mut self, kept: Kept, ended: &mut Ended) {
        kept.into_iter().for_each(|(id, count)| self.let_object_go(id, count, ended));
    }

    /// Keeps some in the place of others.
    pub(crate) fn exchange_objects(&mut self, old: Kept, new: Kept) {
        self.keep_objects(&new);
        let mut ended = Vec::new();
        self.let_objects_go(old, &mut ended);
        end_later(ended);
    }

    /// Keeps what another graph keeps.
    pub(crate) fn keep_objects(&mut self, kept: &Kept) -> Kept {
        for (id, count) in kept {
            if let Some(object) = self.user_objects.get_mut(id) {
                object.count = object.count.saturating_add(*count);
            }
        }
        kept.clone()
    }
}

/// `cuUserObjectCreate`.
pub(crate) fn create(data: u64, function: Option<HostFunction>, count: u32, flags: u32) -> Result<u64> {
    /// The only flag there is, and it must be set: nothing waits for the function.
    const NO_DESTRUCTOR_SYNC: u32 = 1;
    let function = function.ok_or(Error::InvalidValue)?;
    if count == 0 || flags != NO_DESTRUCTOR_SYNC {
        return Err(Error::InvalidValue);
    }
    let mut state = state::lock();
    let id = state.id();
    state.user_objects.insert(id, UserObject { function, data, count });
    Ok(id)
}

/// `cuUserObjectRetain`.
pub(crate) fn retain(id: u64, count: u32) -> Result {
    let mut state = state::lock();
    let object = state.user_objects.get_mut(&id).ok_or(Error::InvalidValue)?;
    object.count = object.count.checked_add(count).filter(|_| count > 0).ok_or(Error::InvalidValue)?;
    Ok(())
}

/// `cuUserObjectRelease`.
pub(crate) fn release(id: u64, count: u32) -> Result {
    let mut state = state::lock();
    let object = state.user_objects.get(&id).ok_or(Error::InvalidValue)?;
    if count == 0 || count > object.count {
        return Err(Error::InvalidValue);
    }
    let mut ended = Vec::new();
    state.let_object_go(id, count, &mut ended);
    drop(state);
    end(ended);
    Ok(())
}

/// `cuGraphRetainUserObject`: references are moved, or are more.
pub(crate) fn keep(graph: u64, id: u64, count: u32, flags: u32) -> Result {
    const MOVE: u32 = 1;
    let mut state = state::lock();
    let state = &mut *state;
    let graph = state.graphs.get_mut(&graph).ok_or(Error::InvalidValue)?;
    let object = state.user_objects.get_mut(&id).ok_or(Error::InvalidValue)?;
    if count == 0 || flags & !MOVE != 0 {
        return Err(Error::InvalidValue);
    }
    if flags & MOVE == 0 {
        object.count = object.count.checked_add(count).ok_or(Error::InvalidValue)?;
    }
    *graph.objects.entry(id).or_default() += count;
    Ok(())
}

/// `cuGraphReleaseUserObject`.
pub(crate) fn let_go(graph: u64, id: u64, count: u32) -> Result {
    let mut state = state::lock();
    let kept = state.graphs.get_mut(&graph).ok_or(Error::InvalidValue)?.objects.get_mut(&id);
    let kept = kept.filter(|kept| count > 0 && count <= **kept).ok_or(Error::InvalidValue)?;
    *kept -= count;
    let mut ended = Vec::new();
    state.let_object_go(id, count, &mut ended);
    drop(state);
    end(ended);
    Ok(())
}
