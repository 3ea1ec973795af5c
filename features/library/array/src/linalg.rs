//! Decompositions of matrices, by `nalgebra` on the host's processor. Axes before the last two are of as many matrices.

use nalgebra::{ComplexField, DMatrix, DVector, Matrix, RealField, SVD, SymmetricEigen, linalg};
use rustfft::num_complex::Complex;

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::host::{self, Element};
use crate::layout::{self, Shape};
use crate::node::Array;

/// Calls a function for the type of an array's elements.
macro_rules! typed {
    ($array:expr, $function:ident($($argument:expr),*)) => {
        match $array.dtype() {
            DType::Float32 => $function::<f32>($($argument),*),
            DType::Float64 => $function::<f64>($($argument),*),
            DType::Complex64 => $function::<Complex<f32>>($($argument),*),
            _ => $function::<Complex<f64>>($($argument),*),
        }
    };
}

/// What elements of matrices are.
trait Number: ComplexField<RealField: RealField + Element> + Element {}

impl<T: ComplexField<RealField: RealField + Element> + Element> Number for T {}

/// An array of matrices, of a type that decompositions have.
fn prepared(function: &'static str, x: &Array) -> Result<Array> {
    if x.ndim() < 2 {
        let what =
            format!("{}-dimensional array given; the array must be at least two-dimensional", x.ndim());
        return Err(Error::Shape { function, what });
    }
    if matches!(x.dtype(), DType::Float16 | DType::BFloat16) {
        let what = "it takes float32, float64, complex64 and complex128";
        return Err(Error::Type { function, dtype: x.dtype(), what });
    }
    x.cast(x.dtype().to_inexact())
}

fn square(function: &'static str, x: &Array) -> Result<Array> {
    let x = prepared(function, x)?;
    match x.shape() {
        [.., m, n] if m == n => Ok(x),
        shape => {
            Err(Error::Shape { function, what: format!("the last two axes of {shape:?} are not square") })
        }
    }
}

/// The axes before the last two, and those.
fn split(x: &Array) -> (&[u64], [usize; 2]) {
    let (lead, last) = x.shape().split_at(x.ndim() - 2);
    (lead, [last[0] as usize, last[1] as usize])
}

fn matrices<T: Number>(x: &Array) -> Result<Vec<DMatrix<T>>> {
    let (lead, [m, n]) = split(x);
    let elements = host::elements::<T>(x)?;
    let matrix = |at: u64| {
        let at = at as usize * m * n;
        DMatrix::from_row_slice(m, n, &elements[at..at + m * n])
    };
    Ok((0..layout::elements(lead)).map(matrix).collect())
}

/// Matrices of one shape as an array.
fn stacked<T: Number>(
    like: &Array,
    dtype: DType,
    lead: &[u64],
    last: [usize; 2],
    matrices: Vec<DMatrix<T>>,
) -> Result<Array> {
    let shape: Shape = lead.iter().copied().chain(last.map(|extent| extent as u64)).collect();
    let rows = matrices.iter().flat_map(|matrix| matrix.row_iter());
    let elements = rows.flat_map(|row| row.iter().copied().collect::<Vec<_>>());
    host::array(like.device(), dtype, &shape, elements)
}

fn identity<T: Number>(n: usize) -> DMatrix<T> {
    DMatrix::identity(n, n)
}

/// All finite: of other numbers no iteration converges.
fn finite<T: Number>(function: &'static str, matrix: &DMatrix<T>) -> Result<()> {
    match matrix.iter().all(|element| element.is_finite()) {
        true => Ok(()),
        false => Err(Error::Matrix { function, what: "the matrix has elements that are infinite or NaN" }),
    }
}

impl Array {
    /// The lower (or upper) triangular L of L Lᴴ, which a positive definite matrix is.
    ///
    /// # Errors
    /// [`Error::Matrix`] if it is not positive definite; [`Error::Shape`], [`Error::Type`].
    pub fn cholesky(&self, upper: bool) -> Result<Array> {
        fn run<T: Number>(x: &Array, upper: bool) -> Result<Array> {
            let (lead, last) = split(x);
            let one = |matrix: DMatrix<T>| {
                let what = "the matrix is not positive definite";
                let made =
                    linalg::Cholesky::new(matrix).ok_or(Error::Matrix { function: "cholesky", what })?;
                Ok(if upper { made.l().adjoint() } else { made.l() })
            };
            let all = matrices::<T>(x)?.into_iter().map(one).collect::<Result<_>>()?;
            stacked(x, x.dtype(), lead, last, all)
        }
        let x = square("cholesky", self)?;
        typed!(x, run(&x, upper))
    }

    /// Q with orthonormal columns and the upper triangular R whose product is the matrix; `complete` has as many columns of Q as rows.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Type`].
    pub fn qr(&self, complete: bool) -> Result<(Array, Array)> {
        fn run<T: Number>(x: &Array, complete: bool) -> Result<(Array, Array)> {
            let (lead, [m, n]) = split(x);
            let k = if complete { m } else { m.min(n) };
            let (mut q, mut r) = (Vec::new(), Vec::new());
            for matrix in matrices::<T>(x)? {
                let (own_q, own_r) = orthogonal(matrix, complete);
                q.push(own_q);
                r.push(own_r);
            }
            Ok((stacked(x, x.dtype(), lead, [m, k], q)?, stacked(x, x.dtype(), lead, [k, n], r)?))
        }
        let x = prepared("qr", self)?;
        typed!(x, run(&x, complete))
    }

    /// U, the singular values, the greatest first, and Vᴴ; `full` has square U and Vᴴ.
    ///
    /// # Errors
    /// [`Error::Matrix`] if it has elements that are not finite; [`Error::Shape`], [`Error::Type`].
    pub fn svd(&self, full: bool) -> Result<(Array, Array, Array)> {
        fn run<T: Number>(x: &Array, full: bool) -> Result<(Array, Array, Array)> {
            let (lead, [m, n]) = split(x);
            let k = m.min(n);
            let (mut u, mut s, mut v) = (Vec::new(), Vec::new(), Vec::new());
            for matrix in matrices::<T>(x)? {
                let (own_u, own_s, own_v) = singular(matrix)?;
                s.push(DMatrix::from_row_slice(1, k, own_s.as_slice()));
                u.push(if full { completed(own_u) } else { own_u });
                v.push(if full { completed(own_v.adjoint()).adjoint() } else { own_v });
            }
            let [rows, columns] = if full { [m, n] } else { [k, k] };
            let mut values: Shape = lead.to_vec();
            values.push(k as u64);
            Ok((
                stacked(x, x.dtype(), lead, [m, rows], u)?,
                stacked(x, x.dtype().real(), lead, [1, k], s)?.reshape(&values)?,
                stacked(x, x.dtype(), lead, [columns, n], v)?,
            ))
        }
        let x = prepared("svd", self)?;
        typed!(x, run(&x, full))
    }

    /// The eigenvalues of a Hermitian matrix, the least first, and its eigenvectors, as columns.
    ///
    /// # Errors
    /// [`Error::Matrix`] if it has elements that are not finite; [`Error::Shape`], [`Error::Type`].
    pub fn eigh(&self) -> Result<(Array, Array)> {
        fn run<T: Number>(x: &Array) -> Result<(Array, Array)> {
            let (lead, [n, _]) = split(x);
            let (mut values, mut vectors): (Vec<DMatrix<T::RealField>>, Vec<DMatrix<T>>) = Default::default();
            for matrix in matrices::<T>(x)? {
                finite("eigh", &matrix)?;
                if n == 0 {
                    values.push(DMatrix::zeros(1, 0));
                    vectors.push(matrix);
                    continue;
                }
                let what = "the eigenvalues did not converge";
                let (matrix, by) = scaled(matrix);
                let made = SymmetricEigen::try_new(matrix, epsilon::<T>(), rounds(n))
                    .ok_or(Error::Matrix { function: "eigh", what })?;
                let mut order: Vec<usize> = (0..n).collect();
                order.sort_by(|a, b| {
                    let [a, b] = [a, b].map(|at| &made.eigenvalues[*at]);
                    a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal)
                });
                values.push(DMatrix::from_fn(1, n, |_, at| made.eigenvalues[order[at]] * by));
                vectors.push(DMatrix::from_fn(n, n, |row, at| made.eigenvectors[(row, order[at])]));
            }
            let mut shape: Shape = lead.to_vec();
            shape.push(n as u64);
            Ok((
                stacked(x, x.dtype().real(), lead, [1, n], values)?.reshape(&shape)?,
                stacked(x, x.dtype(), lead, [n, n], vectors)?,
            ))
        }
        let x = square("eigh", self)?;
        typed!(x, run(&x))
    }

    /// The inverse.
    ///
    /// # Errors
    /// [`Error::Matrix`] if it has none; [`Error::Shape`], [`Error::Type`].
    pub fn inv(&self) -> Result<Array> {
        let x = square("inv", self)?;
        let (_, [n, _]) = split(&x);
        let one = Array::indices(x.device(), &[n as u64, n as u64], 0, 0, 1)?;
        let other = Array::indices(x.device(), &[n as u64, n as u64], 1, 0, 1)?;
        let identity = one.binary(crate::Binary::Equal, &other)?.cast(x.dtype())?;
        solved("inv", &x, &identity)
    }

    /// The X of A X = B, which are matrices.
    ///
    /// # Errors
    /// [`Error::Matrix`] if A has no inverse; [`Error::Shape`], [`Error::Type`].
    pub fn solve(&self, b: &Array) -> Result<Array> {
        let function = "solve";
        let dtype = self.dtype().promote(b.dtype());
        let (a, b) = (square(function, &self.cast(dtype)?)?, prepared(function, &b.cast(dtype)?)?);
        solved(function, &a, &b)
    }

    /// The determinant's sign, of a complex one its phase, and the logarithm of its magnitude.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::Type`].
    pub fn slogdet(&self) -> Result<(Array, Array)> {
        fn run<T: Number>(x: &Array) -> Result<(Array, Array)> {
            let (lead, _) = split(x);
            let (mut signs, mut logs): (Vec<T>, Vec<T::RealField>) = Default::default();
            for matrix in matrices::<T>(x)? {
                let (mut sign, mut log) = (T::one(), nalgebra::zero::<T::RealField>());
                if !matrix.is_empty() {
                    let lu = matrix.lu();
                    sign = lu.p().determinant::<T>();
                    for pivot in lu.lu_internal().diagonal().iter() {
                        let magnitude = pivot.modulus();
                        log += magnitude.ln();
                        sign *=
                            if magnitude == nalgebra::zero() { T::zero() } else { pivot.unscale(magnitude) };
                    }
                }
                signs.push(sign);
                logs.push(log);
            }
            let device = x.device();
            Ok((
                host::array(device, x.dtype(), lead, signs)?,
                host::array(device, x.dtype().real(), lead, logs)?,
            ))
        }
        let x = square("slogdet", self)?;
        typed!(x, run(&x))
    }
}

/// More iterations than any matrix was seen to need.
fn rounds(n: usize) -> usize {
    1000 + 100 * n
}

/// The distance from 1 to the next number.
fn epsilon<T: Number>() -> T::RealField {
    let single = size_of::<T::RealField>() == size_of::<f32>();
    nalgebra::convert(if single { f32::EPSILON.into() } else { f64::EPSILON })
}

fn solved(function: &'static str, a: &Array, b: &Array) -> Result<Array> {
    fn run<T: Number>(function: &'static str, a: &Array, b: &Array) -> Result<Array> {
        let (lead, last) = split(b);
        let one = |(a, b): (DMatrix<T>, DMatrix<T>)| match a.is_empty() || b.is_empty() {
            true => Ok(b),
            false => a.lu().solve(&b).ok_or(Error::Matrix { function, what: "the matrix is singular" }),
        };
        let all = matrices::<T>(a)?.into_iter().zip(matrices::<T>(b)?).map(one).collect::<Result<_>>()?;
        stacked(b, b.dtype(), lead, last, all)
    }
    let ((lead_a, [n, _]), (lead_b, [m, columns])) = (split(a), split(b));
    if n != m {
        let what = format!("{n} unknowns, and right sides of {m} rows");
        return Err(Error::Shape { function, what });
    }
    let lead = layout::broadcast(function, lead_a, lead_b)?;
    let whole = |last: [usize; 2]| lead.iter().copied().chain(last.map(|n| n as u64)).collect::<Shape>();
    let (a, b) = (a.broadcast_to(&whole([n, n]))?, b.broadcast_to(&whole([n, columns]))?);
    typed!(a, run(function, &a, &b))
}

/// A matrix divided by its greatest element, so that no square is beyond the type's range, and that element.
fn scaled<T: Number>(matrix: DMatrix<T>) -> (DMatrix<T>, T::RealField) {
    let most =
        matrix.iter().fold(nalgebra::zero::<T::RealField>(), |most, element| most.max(element.modulus()));
    let none = !most.is_finite() || most == nalgebra::zero();
    let by = if none { nalgebra::one::<T::RealField>() } else { most };
    (matrix.unscale(by), by)
}

/// Q and R of a matrix.
fn orthogonal<T: Number>(matrix: DMatrix<T>, complete: bool) -> (DMatrix<T>, DMatrix<T>) {
    let (matrix, by) = scaled(matrix);
    let (q, r) = factors(matrix, complete);
    (q, r.scale(by))
}

fn factors<T: Number>(matrix: DMatrix<T>, complete: bool) -> (DMatrix<T>, DMatrix<T>) {
    let (m, n) = matrix.shape();
    let k = if complete { m } else { m.min(n) };
    if m == 0 || n == 0 {
        return (DMatrix::identity(m, k), DMatrix::zeros(k, n));
    }
    if !complete || m <= n {
        let made = matrix.qr();
        return (made.q(), made.r());
    }
    // With a column of the identity for each row behind its own columns, it has all columns of Q.
    let mut wide = DMatrix::zeros(m, n + m);
    wide.columns_mut(0, n).copy_from(&matrix);
    wide.columns_mut(n, m).copy_from(&identity(m));
    let made = wide.qr();
    (made.q(), made.r().columns(0, n).into_owned())
}

/// Orthonormal columns with more of them, as many as rows.
fn completed<T: Number>(columns: DMatrix<T>) -> DMatrix<T> {
    let k = columns.ncols();
    let (mut all, _) = orthogonal(columns.clone(), true);
    all.columns_mut(0, k).copy_from(&columns);
    all
}

/// U, the singular values, and Vᴴ.
type Singular<T> = (DMatrix<T>, DVector<<T as ComplexField>::RealField>, DMatrix<T>);

fn singular<T: Number>(matrix: DMatrix<T>) -> Result<Singular<T>> {
    finite("svd", &matrix)?;
    let (m, n) = matrix.shape();
    if m == 0 || n == 0 {
        return Ok((DMatrix::zeros(m, 0), DVector::zeros(0), DMatrix::zeros(0, n)));
    }
    let what = "the singular values did not converge";
    let (matrix, by) = scaled(matrix);
    let made: Option<SVD<T, _, _>> = Matrix::try_svd(matrix, true, true, epsilon::<T>(), rounds(m.max(n)));
    match made {
        Some(SVD { u: Some(u), v_t: Some(v), singular_values }) => Ok((u, singular_values.scale(by), v)),
        _ => Err(Error::Matrix { function: "svd", what }),
    }
}
