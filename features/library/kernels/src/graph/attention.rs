//! Attention and its gradients. Within a graph heads come before tokens: `[batch, heads, tokens, dim]`.

use vm_graph::{Element, Reduction, Value};

use super::{Built, Draft, Drawn, NoGraph};
use crate::append::Layout;
use crate::attention::{
    DecodeAttention, DotProductAttention, DotProductAttentionBackward, Mask, SelfAttention,
    SelfAttentionBackward, UNSEEN,
};
use crate::call::Function as _;

/// Which keys a query sees: truth values of queries × keys, and whether a query may see none. None if each sees all.
type Seen = Option<(Value, bool)>;

/// What a mask lets queries see.
fn seen(g: &mut Draft, mask: Mask, window: [u32; 2], [queries, keys]: [u64; 2]) -> Result<Seen, NoGraph> {
    let [left, right] = match mask {
        Mask::Full => return Ok(None),
        Mask::Causal => [None, Some(0)],
        // Beyond all keys is as good as any number.
        Mask::Window => window.map(|reach| Some(i64::from(reach).min(1 << 30))),
    };
    if queries.max(keys) >= 1 << 30 {
        return Err(g.no(format!("{queries} queries and {keys} keys; fewer than 2^30 are possible")));
    }
    let first = keys.cast_signed() - queries.cast_signed();
    let places = g.count_from(0, Element::I32, &[keys])?;
    let mut all = None;
    if let Some(right) = right {
        let last = g.count_from(first + right, Element::I32, &[queries, 1])?;
        all = Some(g.less_or_equal(places, last)?);
    }
    if let Some(left) = left {
        let least = g.count_from(first - left, Element::I32, &[queries, 1])?;
        let near = g.greater_or_equal(places, least)?;
        all = Some(all.map_or(Ok(near), |all| g.and(all, near))?);
    }
    Ok(all.map(|all| (all, first + right.unwrap_or(0) < 0)))
}

/// Heads of queries that share one of keys, one behind the other, as its rows: `[batch, shared, rows, n]`.
fn together(g: &mut Draft, x: Value, shared: u64) -> Built {
    let [batch, heads, rows, n] = extents(g, x);
    g.shaped(x, &[batch, shared, heads / shared * rows, n])
}

fn extents(g: &Draft, x: Value) -> [u64; 4] {
    let mut all = [1; 4];
    all.iter_mut().zip(&g.type_of(x).extents).for_each(|(to, from)| *to = *from);
    all
}

/// Products of each head's matrix with that of its head of keys.
fn by_head(g: &mut Draft, x: Value, of_keys: Value) -> Built {
    let ([batch, heads, rows, _], [_, shared, _, n]) = (extents(g, x), extents(g, of_keys));
    let x = together(g, x, shared)?;
    let product = g.mat_mul(x, of_keys)?;
    g.shaped(product, &[batch, heads, rows, n])
}

/// softmax(scale · Q · Kᵀ + bias) · V, and the scores, with those that are not seen below all others.
struct Attended {
    o: Value,
    scores: Value,
    seen: Seen,
}

fn attend(
    g: &mut Draft,
    [q, k, v]: [Value; 3],
    scale: f64,
    bias: Option<Value>,
    mut seen: Seen,
) -> Result<Attended, NoGraph> {
    let keys = g.turned(k)?;
    let q = g.times(q, scale)?;
    let mut scores = by_head(g, q, keys)?;
    if let Some(bias) = bias {
        scores = g.add(scores, bias)?;
        let least = g.number(f32::MIN.into())?;
        let unmasked = g.greater_or_equal(bias, least)?;
        let all = seen.map_or(Ok(unmasked), |(all, _)| g.and(all, unmasked))?;
        seen = Some((all, true));
    }
    if let Some((all, _)) = seen {
        scores = g.or(all, scores, UNSEEN.into())?;
    }
    let mut weights = g.softmax(scores, 3)?;
    if let Some((all, true)) = seen {
        weights = g.or(all, weights, 0.0)?;
    }
    Ok(Attended { o: by_head(g, weights, v)?, scores, seen })
}

impl Attended {
    /// The logarithms of the sums of exponentials, which are −∞ without a key.
    fn log_sums(&self, g: &mut Draft) -> Built {
        let greatest = g.reduce(Reduction::Max, self.scores, &[3])?;
        let below = g.sub(self.scores, greatest)?;
        let mut powers = g.exp(below)?;
        if let Some((all, true)) = self.seen {
            powers = g.or(all, powers, 0.0)?;
        }
        let sum = g.sum(powers, &[3])?;
        let log = g.log(sum)?;
        g.add(greatest, log)
    }
}

/// Where gradients come from, all with heads before tokens; `log_sums` has one element for each query.
struct Trained {
    factors: [Value; 3],
    o: Value,
    d_o: Value,
    log_sums: Value,
}

impl Trained {
    /// Those of Q, K and V.
    fn gradients(self, g: &mut Draft, scale: f64, seen: Seen) -> Result<[Value; 3], NoGraph> {
        let [q, k, v] = self.factors;
        let ([batch, heads, queries, dim], [_, shared, keys, _]) = (extents(g, q), extents(g, k));
        let turned = g.turned(k)?;
        let scores = by_head(g, q, turned)?;
        let scores = g.times(scores, scale)?;
        let log_sums = g.shaped(self.log_sums, &[batch, heads, queries, 1])?;
        let below = g.sub(scores, log_sums)?;
        let mut weights = g.exp(below)?;
        if let Some((all, _)) = seen {
            weights = g.or(all, weights, 0.0)?;
        }
        let products = g.mul(self.o, self.d_o)?;
        let delta = g.sum(products, &[3])?;
        let values = g.turned(v)?;
        let slopes = by_head(g, self.d_o, values)?;
        let slopes = g.sub(slopes, delta)?;
        let slopes = g.mul(weights, slopes)?;
        let slopes = g.times(slopes, scale)?;
        let dq = by_head(g, slopes, k)?;
        // Sums over a head's queries are sums over those of all heads that share its keys.
        let sums = |g: &mut Draft, of: Value, with: Value| {
            let (of, with) = (together(g, of, shared)?, together(g, with, shared)?);
            let of = g.turned(of)?;
            let sums = g.mat_mul(of, with)?;
            g.shaped(sums, &[batch, shared, keys, dim])
        };
        Ok([dq, sums(g, slopes, q)?, sums(g, weights, self.d_o)?])
    }
}

/// Heads before tokens, or tokens before heads.
fn swapped(g: &mut Draft, x: Value) -> Built {
    g.transpose(x, &[0, 2, 1, 3])
}

fn check_heads(g: &Draft, [heads, shared]: [u64; 2]) -> Result<(), NoGraph> {
    if shared == 0 || !heads.is_multiple_of(shared) {
        return Err(g.no(format!("{heads} heads can't share {shared} heads of keys evenly")));
    }
    Ok(())
}

/// A buffer of floats with heads before tokens.
fn heads(g: &mut Draft, name: &str) -> Result<Value, NoGraph> {
    let x = g.float(name)?;
    Ok(swapped(g, x)?)
}

/// Attention of separate queries, keys and values.
pub(crate) fn dot_product(of: &DotProductAttention) -> Drawn {
    let DotProductAttention { mask, window, lengths, .. } = *of;
    let mut g = Draft::of("attention", of.buffers())?;
    check_heads(&g, of.heads)?;
    let mut factors = ["q", "k", "v"].map(|name| heads(&mut g, name));
    if of.fp8.is_some() {
        for (factor, name) in factors.iter_mut().zip(["q_scales", "k_scales", "v_scales"]) {
            let scales = g.float(name)?;
            let mut extents = g.type_of(scales).extents.clone();
            extents.resize(4, 1);
            let scales = g.reshape(scales, &extents)?;
            if let Ok(factor) = factor {
                *factor = g.mul(*factor, scales)?;
            }
        }
    }
    let [q, k, v] = factors;
    let bias = g.float_if(of.bias, "bias")?;
    let seen = seen(&mut g, mask, window, lengths)?;
    let attended = attend(&mut g, [q?, k?, v?], of.scale.into(), bias, seen)?;
    let o = swapped(&mut g, attended.o)?;
    g.put("o", o)?;
    if of.log_sums {
        let log_sums = attended.log_sums(&mut g)?;
        g.put("log_sums", log_sums)?;
    }
    g.finish()
}

/// Its gradients.
pub(crate) fn dot_product_backward(of: &DotProductAttentionBackward) -> Drawn {
    let DotProductAttention { mask, window, lengths, fp8, bias, .. } = of.0;
    let mut g = Draft::of("attention_backward", of.buffers())?;
    if fp8.is_some() || bias {
        return Err(g.no("attention of FP8, or with a bias, has no gradients"));
    }
    check_heads(&g, of.0.heads)?;
    let factors = [heads(&mut g, "q")?, heads(&mut g, "k")?, heads(&mut g, "v")?];
    let (o, d_o) = (heads(&mut g, "o")?, heads(&mut g, "do")?);
    let log_sums = g.float("log_sums")?;
    let seen = seen(&mut g, mask, window, lengths)?;
    let gradients = Trained { factors, o, d_o, log_sums }.gradients(&mut g, of.0.scale.into(), seen)?;
    for (name, gradient) in ["dq", "dk", "dv"].into_iter().zip(gradients) {
        let gradient = swapped(&mut g, gradient)?;
        g.put(name, gradient)?;
    }
    g.finish()
}

/// Queries, keys and values of one array, with heads before tokens.
fn split(g: &mut Draft, of: &SelfAttention) -> Result<[Value; 3], NoGraph> {
    let [own, shared] = of.heads;
    check_heads(g, of.heads)?;
    let qkv = heads(g, "qkv")?;
    let q = g.slice(qkv, 1, 0, own)?;
    let k = g.slice(qkv, 1, own, own + shared)?;
    Ok([q, k, g.slice(qkv, 1, own + shared, own + 2 * shared)?])
}

fn seen_by_itself(g: &mut Draft, of: &SelfAttention) -> Result<Seen, NoGraph> {
    seen(g, if of.causal { Mask::Causal } else { Mask::Full }, [0; 2], [of.tokens; 2])
}

/// Attention of one array of queries, keys and values.
pub(crate) fn self_attention(of: &SelfAttention) -> Drawn {
    let mut g = Draft::of("self_attention", of.buffers())?;
    let factors = split(&mut g, of)?;
    let seen = seen_by_itself(&mut g, of)?;
    let attended = attend(&mut g, factors, of.scale.into(), None, seen)?;
    let o = swapped(&mut g, attended.o)?;
    g.put("o", o)?;
    let log_sums = attended.log_sums(&mut g)?;
    g.put("log_sums", log_sums)?;
    g.finish()
}

/// Its gradients.
pub(crate) fn self_attention_backward(of: &SelfAttentionBackward) -> Drawn {
    let mut g = Draft::of("self_attention_backward", of.buffers())?;
    let factors = split(&mut g, &of.0)?;
    let (o, d_o) = (heads(&mut g, "o")?, heads(&mut g, "do")?);
    let log_sums = g.float("log_sums")?;
    let seen = seen_by_itself(&mut g, &of.0)?;
    let gradients = Trained { factors, o, d_o, log_sums }.gradients(&mut g, of.0.scale.into(), seen)?;
    let all = g.concat(&gradients, 1)?;
    let all = swapped(&mut g, all)?;
    g.put("dqkv", all)?;
    g.finish()
}

/// Attention of one token of each sequence to what is in a cache.
pub(crate) fn decode(of: &DecodeAttention) -> Drawn {
    let DecodeAttention { batch, heads: [heads, shared], layout, packed, .. } = *of;
    let dim = u64::from(of.dim);
    let mut g = Draft::of("decode_attention", of.buffers())?;
    check_heads(&g, of.heads)?;
    let mut q = g.float(if packed { "qkv" } else { "q" })?;
    if packed {
        q = g.slice(q, 1, 0, heads)?;
    }
    let q = g.reshape(q, &[batch, heads, 1, dim])?;
    let mut room = 0;
    let mut caches = Vec::new();
    for name in ["k_cache", "v_cache"] {
        let mut cache = g.float(name)?;
        (cache, room) = match layout {
            Layout::Contiguous { capacity } => (cache, capacity),
            Layout::Paged { pages, page, of_sequence } => {
                let table = g.given("table")?;
                let is_page = g.below(table, pages)?;
                let is_page = g.reshape(is_page, &[batch, of_sequence, 1, 1, 1])?;
                let found = g.gather(cache, table, 0)?;
                let found = g.or(is_page, found, 0.0)?;
                let room = of_sequence * u64::from(page);
                (g.reshape(found, &[batch, room, shared, dim])?, room)
            }
        };
        caches.push(swapped(&mut g, cache)?);
    }
    let lengths = g.given("lengths")?;
    let lengths = g.reshape(lengths, &[batch, 1, 1, 1])?;
    let places = g.count_from(0, Element::I32, &[room])?;
    let all = g.less(places, lengths)?;
    let attended = attend(&mut g, [q, caches[0], caches[1]], of.scale.into(), None, Some((all, true)))?;
    g.put("o", attended.o)?;
    g.finish()
}
