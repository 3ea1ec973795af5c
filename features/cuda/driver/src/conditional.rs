//! Conditions of graphs, and nodes whose graphs run as those say.

use crate::{
    error::{Error, Result},
    exec::{Step, order},
    graph::{Graph, Task},
    state::{self, State},
    stream::{Work, perform},
};
use std::sync::MutexGuard;

/// A condition: of one graph, and of one node in it.
pub(crate) struct Condition {
    graph: u64,
    /// What it is when the graph is launched, where that is said.
    at_launch: Option<u32>,
    value: u32,
    has_node: bool,
}

impl Condition {
    pub(crate) fn is_of(&self, graph: u64) -> bool {
        self.graph == graph
    }
}

/// `CUgraphConditionalNodeType`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum How {
    If,
    While,
    Switch,
}

impl How {
    pub(crate) fn named(number: u32) -> Result<Self> {
        [Self::If, Self::While, Self::Switch].get(number as usize).copied().ok_or(Error::InvalidValue)
    }

    fn has(self, graphs: u32) -> bool {
        match self {
            Self::If => (1..=2).contains(&graphs),
            Self::While => graphs == 1,
            Self::Switch => graphs > 0,
        }
    }

    /// Which graph runs.
    fn which(self, value: u32) -> Option<usize> {
        match self {
            Self::If => Some(usize::from(value == 0)),
            Self::While => (value != 0).then_some(0),
            Self::Switch => Some(value as usize),
        }
    }
}

/// `cuGraphConditionalHandleCreate`.
pub(crate) fn create(graph: u64, default: u32, flags: u32) -> Result<u64> {
    const ASSIGN_DEFAULT: u32 = 1;
    let mut state = state::lock();
    if !state.graphs.contains_key(&graph) || flags & !ASSIGN_DEFAULT != 0 {
        return Err(Error::InvalidValue);
    }
    let at_launch = (flags == ASSIGN_DEFAULT).then_some(default);
    let id = state.id();
    state.conditions.insert(id, Condition { graph, at_launch, value: default, has_node: false });
    Ok(id)
}

impl State {
    /// The graphs of a conditional node, which are empty at first.
    pub(crate) fn graphs_for(&mut self, graph: u64, handle: u64, how: How, count: u32) -> Result<Vec<u64>> {
        let condition = self.conditions.get_mut(&handle).ok_or(Error::InvalidValue)?;
        if condition.graph != graph || condition.has_node || !how.has(count) || count > 1 << 10 {
            return Err(Error::InvalidValue);
        }
        condition.has_node = true;
        let made = |_| {
            let id = self.id();
            self.graphs.insert(id, Graph::of_condition());
            id
        };
        Ok((0..count).map(made).collect())
    }

    /// A kernel says what a condition is.
    pub(crate) fn set_condition(&mut self, handle: u64, value: u32) -> Result {
        self.conditions.get_mut(&handle).ok_or(Error::IllegalAddress)?.value = value;
        Ok(())
    }

    /// What conditions are at a launch of steps.
    pub(crate) fn assign(&mut self, steps: &[Step]) {
        for step in steps {
            if let Task::Conditional { handle, .. } = step.task
                && let Some(condition) = self.conditions.get_mut(&handle)
                && let Some(value) = condition.at_launch
            {
                condition.value = value;
            }
            self.assign(&step.inner);
        }
    }
}

type Done = (MutexGuard<'static, State>, Result);

/// Runs the graph that a condition says, as long as it says so.
pub(crate) fn run(
    mut state: MutexGuard<'static, State>,
    context: u64,
    handle: u64,
    how: How,
    graphs: &[Step],
) -> Done {
    loop {
        let Some(condition) = state.conditions.get(&handle) else { return (state, Err(Error::InvalidValue)) };
        let Some(graph) = how.which(condition.value).and_then(|which| graphs.get(which)) else {
            return (state, Ok(()));
        };
        let (next, result) = run_all(state, context, &graph.inner);
        state = next;
        if result.is_err() || how != How::While || !state.works(context) {
            return (state, result);
        }
    }
}

fn run_all(mut state: MutexGuard<'static, State>, context: u64, steps: &[Step]) -> Done {
    let Ok(order) = order(steps) else { return (state, Err(Error::InvalidValue)) };
    for at in order {
        let work = match &steps[at].task {
            Task::Graph(_) | Task::Moved(_) => {
                let (next, result) = run_all(state, context, &steps[at].inner);
                state = next;
                if result.is_err() {
                    return (state, result);
                }
                continue;
            }
            Task::Kernel(launch) => Work::Launch(launch.clone()),
            Task::Copy(copy) => Work::Copy(copy.clone()),
            Task::Fill(fill) => Work::Fill(fill.clone()),
            Task::Conditional { handle, how, .. } => {
                Work::Conditional { handle: *handle, how: *how, graphs: steps[at].inner.clone() }
            }
            _ => Work::Nothing,
        };
        let (next, result) = perform(state, context, work);
        state = next;
        if result.is_err() {
            return (state, result);
        }
    }
    (state, Ok(()))
}
