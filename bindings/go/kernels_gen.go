// Code generated from features/interop/capi by its build script; DO NOT EDIT.
// VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header

package vmaccel

// #include <vmkernels.h>
import "C"

import "math"

// Gemm: C = alpha A B + beta C. A is [M, K], B is [K, N], C is [M, N], row-major and dense. With beta 0 C is not read.
// Slices that are too short are refused.
func Gemm[T Float](a []T, b []T, c []T, m int32, n int32, k int32, alpha float32, beta float32) error {
	if err := checkSizes("cuda_gemm"+suffix[T](), []uint64{1, 1, 1, uint64(m), uint64(n), uint64(k), uint64(math.Float32bits(alpha)), uint64(math.Float32bits(beta))}, []extent{{"a", sizeOf(a)}, {"b", sizeOf(b)}, {"c", sizeOf(c)}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_gemm((*C.float)(address(a)), (*C.float)(address(b)), (*C.float)(address(c)), C.int(m), C.int(n), C.int(k), C.float(alpha), C.float(beta), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gemm_bf16((*C.vmk_bf16)(address(a)), (*C.vmk_bf16)(address(b)), (*C.vmk_bf16)(address(c)), C.int(m), C.int(n), C.int(k), C.float(alpha), C.float(beta), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gemm_f16((*C.vmk_f16)(address(a)), (*C.vmk_f16)(address(b)), (*C.vmk_f16)(address(c)), C.int(m), C.int(n), C.int(k), C.float(alpha), C.float(beta), nil)
		})
	}
	return errNoElements
}

// GemmBatched: The same for each of batch matrices, one behind the other.
// Slices that are too short are refused.
func GemmBatched[T Float](a []T, b []T, c []T, batch int32, m int32, n int32, k int32, alpha float32, beta float32) error {
	if err := checkSizes("cuda_gemm_batched"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(m), uint64(n), uint64(k), uint64(math.Float32bits(alpha)), uint64(math.Float32bits(beta))}, []extent{{"a", sizeOf(a)}, {"b", sizeOf(b)}, {"c", sizeOf(c)}, {}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_gemm_batched((*C.float)(address(a)), (*C.float)(address(b)), (*C.float)(address(c)), C.int(batch), C.int(m), C.int(n), C.int(k), C.float(alpha), C.float(beta), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gemm_batched_bf16((*C.vmk_bf16)(address(a)), (*C.vmk_bf16)(address(b)), (*C.vmk_bf16)(address(c)), C.int(batch), C.int(m), C.int(n), C.int(k), C.float(alpha), C.float(beta), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gemm_batched_f16((*C.vmk_f16)(address(a)), (*C.vmk_f16)(address(b)), (*C.vmk_f16)(address(c)), C.int(batch), C.int(m), C.int(n), C.int(k), C.float(alpha), C.float(beta), nil)
		})
	}
	return errNoElements
}

// Linear: A layer's product as torch.nn.Linear has it: output = input weight' + bias. input is [batch, in_dim], weight [out_dim, in_dim], output
// [batch, out_dim]; bias is NULL or [out_dim].
// Slices that are too short are refused.
func Linear[T Float](input []T, weight []T, output []T, bias []T, batch int32, inDim int32, outDim int32) error {
	if err := checkSizes("cuda_linear"+suffix[T](), []uint64{1, 1, 1, given(bias), uint64(batch), uint64(inDim), uint64(outDim)}, []extent{{"input", sizeOf(input)}, {"weight", sizeOf(weight)}, {"output", sizeOf(output)}, {"bias", sizeOf(bias)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_linear((*C.float)(address(input)), (*C.float)(address(weight)), (*C.float)(address(output)), (*C.float)(address(bias)), C.int(batch), C.int(inDim), C.int(outDim), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_linear_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(weight)), (*C.vmk_bf16)(address(output)), (*C.vmk_bf16)(address(bias)), C.int(batch), C.int(inDim), C.int(outDim), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_linear_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(weight)), (*C.vmk_f16)(address(output)), (*C.vmk_f16)(address(bias)), C.int(batch), C.int(inDim), C.int(outDim), nil)
		})
	}
	return errNoElements
}

// Transpose: output[j, i] = input[i, j]. input is [rows, cols], output [cols, rows].
// Slices that are too short are refused.
func Transpose[T Float](input []T, output []T, rows int32, cols int32) error {
	if err := checkSizes("cuda_transpose"+suffix[T](), []uint64{1, 1, uint64(rows), uint64(cols)}, []extent{{"input", sizeOf(input)}, {"output", sizeOf(output)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_transpose((*C.float)(address(input)), (*C.float)(address(output)), C.int(rows), C.int(cols), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_transpose_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(output)), C.int(rows), C.int(cols), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_transpose_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(output)), C.int(rows), C.int(cols), nil)
		})
	}
	return errNoElements
}

// Embedding: output[i, :] = table[indices[i], :], of count rows of dim elements; table has rows rows, and what has another index becomes 0.
// Slices that are too short are refused.
func Embedding[T Float](table []T, indices []int32, output []T, count int64, dim int64, rows int64) error {
	if err := checkSizes("cuda_embedding"+suffix[T](), []uint64{1, 1, 1, uint64(count), uint64(dim), uint64(rows)}, []extent{{"table", sizeOf(table)}, {"indices", sizeOf(indices)}, {"output", sizeOf(output)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_embedding((*C.float)(address(table)), (*C.int32_t)(address(indices)), (*C.float)(address(output)), C.int64_t(count), C.int64_t(dim), C.int64_t(rows), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_embedding_bf16((*C.vmk_bf16)(address(table)), (*C.int32_t)(address(indices)), (*C.vmk_bf16)(address(output)), C.int64_t(count), C.int64_t(dim), C.int64_t(rows), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_embedding_f16((*C.vmk_f16)(address(table)), (*C.int32_t)(address(indices)), (*C.vmk_f16)(address(output)), C.int64_t(count), C.int64_t(dim), C.int64_t(rows), nil)
		})
	}
	return errNoElements
}

// MqaAttention: Multi-query attention: output = softmax(scale Q K' + mask) V for each head. Q and output are [batch, seq_len, n_heads, head_dim], K and V
// [batch, seq_len, head_dim], which all heads share. mask is NULL, or [seq_len, seq_len] floats that are added to the scores of each query
// (row) with each key (column), the same for all sequences and heads: -INFINITY masks a key, and a query all of whose keys are masked
// gets zeros. head_dim is at most 256, scale above 0.
// Slices that are too short are refused.
func MqaAttention[T Float](q []T, k []T, v []T, output []T, mask []float32, batch int32, seqLen int32, nHeads int32, headDim int32, scale float32) error {
	if err := checkSizes("cuda_mqa_attention"+suffix[T](), []uint64{1, 1, 1, 1, given(mask), uint64(batch), uint64(seqLen), uint64(nHeads), uint64(headDim), uint64(math.Float32bits(scale))}, []extent{{"q", sizeOf(q)}, {"k", sizeOf(k)}, {"v", sizeOf(v)}, {"output", sizeOf(output)}, {"mask", sizeOf(mask)}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_mqa_attention((*C.float)(address(q)), (*C.float)(address(k)), (*C.float)(address(v)), (*C.float)(address(output)), (*C.float)(address(mask)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_mqa_attention_bf16((*C.vmk_bf16)(address(q)), (*C.vmk_bf16)(address(k)), (*C.vmk_bf16)(address(v)), (*C.vmk_bf16)(address(output)), (*C.float)(address(mask)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_mqa_attention_f16((*C.vmk_f16)(address(q)), (*C.vmk_f16)(address(k)), (*C.vmk_f16)(address(v)), (*C.vmk_f16)(address(output)), (*C.float)(address(mask)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), nil)
		})
	}
	return errNoElements
}

// FlashAttention: Attention: output = softmax(scale Q K') V for each head. Q, K, V and output are [batch, seq_len, n_heads, head_dim]. If is_causal is not 0, a
// query sees the keys up to its own place. head_dim is at most 256, scale above 0.
// Slices that are too short are refused.
func FlashAttention[T Float](q []T, k []T, v []T, output []T, batch int32, seqLen int32, nHeads int32, headDim int32, scale float32, isCausal bool) error {
	if err := checkSizes("cuda_flash_attention"+suffix[T](), []uint64{1, 1, 1, 1, uint64(batch), uint64(seqLen), uint64(nHeads), uint64(headDim), uint64(math.Float32bits(scale)), flag(isCausal)}, []extent{{"q", sizeOf(q)}, {"k", sizeOf(k)}, {"v", sizeOf(v)}, {"output", sizeOf(output)}, {}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention((*C.float)(address(q)), (*C.float)(address(k)), (*C.float)(address(v)), (*C.float)(address(output)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_bf16((*C.vmk_bf16)(address(q)), (*C.vmk_bf16)(address(k)), (*C.vmk_bf16)(address(v)), (*C.vmk_bf16)(address(output)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_f16((*C.vmk_f16)(address(q)), (*C.vmk_f16)(address(k)), (*C.vmk_f16)(address(v)), (*C.vmk_f16)(address(output)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), nil)
		})
	}
	return errNoElements
}

// FlashAttentionLse: The same, and in log_sums, [batch, n_heads, seq_len], the logarithm of each query's sum of e^score, which cuda_flash_attention_backward needs.
// Slices that are too short are refused.
func FlashAttentionLse[T Float](q []T, k []T, v []T, output []T, logSums []float32, batch int32, seqLen int32, nHeads int32, headDim int32, scale float32, isCausal bool) error {
	if err := checkSizes("cuda_flash_attention_lse"+suffix[T](), []uint64{1, 1, 1, 1, 1, uint64(batch), uint64(seqLen), uint64(nHeads), uint64(headDim), uint64(math.Float32bits(scale)), flag(isCausal)}, []extent{{"q", sizeOf(q)}, {"k", sizeOf(k)}, {"v", sizeOf(v)}, {"output", sizeOf(output)}, {"logSums", sizeOf(logSums)}, {}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_lse((*C.float)(address(q)), (*C.float)(address(k)), (*C.float)(address(v)), (*C.float)(address(output)), (*C.float)(address(logSums)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_lse_bf16((*C.vmk_bf16)(address(q)), (*C.vmk_bf16)(address(k)), (*C.vmk_bf16)(address(v)), (*C.vmk_bf16)(address(output)), (*C.float)(address(logSums)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_lse_f16((*C.vmk_f16)(address(q)), (*C.vmk_f16)(address(k)), (*C.vmk_f16)(address(v)), (*C.vmk_f16)(address(output)), (*C.float)(address(logSums)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), nil)
		})
	}
	return errNoElements
}

// FlashAttentionBackward: The gradients of attention, dQ, dK and dV, from doutput, that of its output; output and log_sums are those of cuda_flash_attention_lse. It
// needs the form with _ws wherever there is anything to compute. Of bf16 and f16, with a head_dim of 64 or 128, dQ is added up in any order.
// Slices that are too short are refused.
func FlashAttentionBackward[T Float](q []T, k []T, v []T, output []T, logSums []float32, doutput []T, dQ []T, dK []T, dV []T, batch int32, seqLen int32, nHeads int32, headDim int32, scale float32, isCausal bool) error {
	if err := checkSizes("cuda_flash_attention_backward"+suffix[T](), []uint64{1, 1, 1, 1, 1, 1, 1, 1, 1, uint64(batch), uint64(seqLen), uint64(nHeads), uint64(headDim), uint64(math.Float32bits(scale)), flag(isCausal)}, []extent{{"q", sizeOf(q)}, {"k", sizeOf(k)}, {"v", sizeOf(v)}, {"output", sizeOf(output)}, {"logSums", sizeOf(logSums)}, {"doutput", sizeOf(doutput)}, {"dQ", sizeOf(dQ)}, {"dK", sizeOf(dK)}, {"dV", sizeOf(dV)}, {}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_flash_attention_backward_workspace_size(C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_backward_ws((*C.float)(address(q)), (*C.float)(address(k)), (*C.float)(address(v)), (*C.float)(address(output)), (*C.float)(address(logSums)), (*C.float)(address(doutput)), (*C.float)(address(dQ)), (*C.float)(address(dK)), (*C.float)(address(dV)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_flash_attention_backward_bf16_workspace_size(C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_backward_bf16_ws((*C.vmk_bf16)(address(q)), (*C.vmk_bf16)(address(k)), (*C.vmk_bf16)(address(v)), (*C.vmk_bf16)(address(output)), (*C.float)(address(logSums)), (*C.vmk_bf16)(address(doutput)), (*C.vmk_bf16)(address(dQ)), (*C.vmk_bf16)(address(dK)), (*C.vmk_bf16)(address(dV)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_flash_attention_backward_f16_workspace_size(C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_flash_attention_backward_f16_ws((*C.vmk_f16)(address(q)), (*C.vmk_f16)(address(k)), (*C.vmk_f16)(address(v)), (*C.vmk_f16)(address(output)), (*C.float)(address(logSums)), (*C.vmk_f16)(address(doutput)), (*C.vmk_f16)(address(dQ)), (*C.vmk_f16)(address(dK)), (*C.vmk_f16)(address(dV)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), C.float(scale), C.int(flag(isCausal)), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// Rope: Rotary position embedding of q and k, both [batch, seq_len, n_heads, head_dim], in place: the elements i and i + head_dim / 2 of a head
// are turned by the angle of the token's place in its sequence times freqs[i]. freqs is [head_dim / 2]; head_dim is even and at most 512.
// Slices that are too short are refused.
func Rope[T Float](q []T, k []T, freqs []float32, batch int32, seqLen int32, nHeads int32, headDim int32) error {
	if err := checkSizes("cuda_rope"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(seqLen), uint64(nHeads), uint64(headDim)}, []extent{{"q", sizeOf(q)}, {"k", sizeOf(k)}, {"freqs", sizeOf(freqs)}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_rope((*C.float)(address(q)), (*C.float)(address(k)), (*C.float)(address(freqs)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_rope_bf16((*C.vmk_bf16)(address(q)), (*C.vmk_bf16)(address(k)), (*C.float)(address(freqs)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_rope_f16((*C.vmk_f16)(address(q)), (*C.vmk_f16)(address(k)), (*C.float)(address(freqs)), C.int(batch), C.int(seqLen), C.int(nHeads), C.int(headDim), nil)
		})
	}
	return errNoElements
}

// AdamwStep: A step of AdamW as torch.optim.AdamW does it, of param and its gradient, with m and v in f32; step counts from 1.
// Slices that are too short are refused.
func AdamwStep[T Float](param []T, grad []T, m []float32, v []float32, lr float32, beta1 float32, beta2 float32, eps float32, weightDecay float32, step int32, size int64) error {
	if err := checkSizes("cuda_adamw_step"+suffix[T](), []uint64{1, 1, 1, 1, uint64(math.Float32bits(lr)), uint64(math.Float32bits(beta1)), uint64(math.Float32bits(beta2)), uint64(math.Float32bits(eps)), uint64(math.Float32bits(weightDecay)), uint64(step), uint64(size)}, []extent{{"param", sizeOf(param)}, {"grad", sizeOf(grad)}, {"m", sizeOf(m)}, {"v", sizeOf(v)}, {}, {}, {}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_adamw_step((*C.float)(address(param)), (*C.float)(address(grad)), (*C.float)(address(m)), (*C.float)(address(v)), C.float(lr), C.float(beta1), C.float(beta2), C.float(eps), C.float(weightDecay), C.int(step), C.int64_t(size), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_adamw_step_bf16((*C.vmk_bf16)(address(param)), (*C.vmk_bf16)(address(grad)), (*C.float)(address(m)), (*C.float)(address(v)), C.float(lr), C.float(beta1), C.float(beta2), C.float(eps), C.float(weightDecay), C.int(step), C.int64_t(size), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_adamw_step_f16((*C.vmk_f16)(address(param)), (*C.vmk_f16)(address(grad)), (*C.float)(address(m)), (*C.float)(address(v)), C.float(lr), C.float(beta1), C.float(beta2), C.float(eps), C.float(weightDecay), C.int(step), C.int64_t(size), nil)
		})
	}
	return errNoElements
}

// GradClip: Multiplies grad by min(1, clip_norm / (norm + 1e-6)), and stores its norm of before in total_norm[0]. partial_norms is memory to work in, of as
// many bytes as cuda_grad_clip_workspace_size tells.
// Slices that are too short are refused.
func GradClip[T Float](grad []T, totalNorm []float32, clipNorm float32, size int64) error {
	if err := checkSizes("cuda_grad_clip"+suffix[T](), []uint64{1, 1, 1, uint64(math.Float32bits(clipNorm)), uint64(size)}, []extent{{"grad", sizeOf(grad)}, {}, {"totalNorm", sizeOf(totalNorm)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_grad_clip_workspace_size(C.float(clipNorm), C.int64_t(size), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_grad_clip((*C.float)(address(grad)), (*C.float)(address(space)), (*C.float)(address(totalNorm)), C.float(clipNorm), C.int64_t(size), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_grad_clip_bf16_workspace_size(C.float(clipNorm), C.int64_t(size), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_grad_clip_bf16((*C.vmk_bf16)(address(grad)), (*C.float)(address(space)), (*C.float)(address(totalNorm)), C.float(clipNorm), C.int64_t(size), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_grad_clip_f16_workspace_size(C.float(clipNorm), C.int64_t(size), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_grad_clip_f16((*C.vmk_f16)(address(grad)), (*C.float)(address(space)), (*C.float)(address(totalNorm)), C.float(clipNorm), C.int64_t(size), nil)
		})
	}
	return errNoElements
}

// ScatterAdd: output[indices[i], :] += input[i, :], of count rows of dim elements; output has rows rows, and what has another index is left out. Sums are made
// in f32 by atomics, in any order.
// Slices that are too short are refused.
func ScatterAdd[T Float](input []T, indices []int32, output []float32, count int64, dim int64, rows int64) error {
	if err := checkSizes("cuda_scatter_add"+suffix[T](), []uint64{1, 1, 1, uint64(count), uint64(dim), uint64(rows)}, []extent{{"input", sizeOf(input)}, {"indices", sizeOf(indices)}, {"output", sizeOf(output)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_scatter_add((*C.float)(address(input)), (*C.int32_t)(address(indices)), (*C.float)(address(output)), C.int64_t(count), C.int64_t(dim), C.int64_t(rows), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_scatter_add_bf16((*C.vmk_bf16)(address(input)), (*C.int32_t)(address(indices)), (*C.float)(address(output)), C.int64_t(count), C.int64_t(dim), C.int64_t(rows), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_scatter_add_f16((*C.vmk_f16)(address(input)), (*C.int32_t)(address(indices)), (*C.float)(address(output)), C.int64_t(count), C.int64_t(dim), C.int64_t(rows), nil)
		})
	}
	return errNoElements
}

// ZeroGrad: Sets grad to 0.
// Slices that are too short are refused.
func ZeroGrad[T Float](grad []T, size int64) error {
	if err := checkSizes("cuda_zero_grad"+suffix[T](), []uint64{1, uint64(size)}, []extent{{"grad", sizeOf(grad)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_zero_grad((*C.float)(address(grad)), C.int64_t(size), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_zero_grad_bf16((*C.vmk_bf16)(address(grad)), C.int64_t(size), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_zero_grad_f16((*C.vmk_f16)(address(grad)), C.int64_t(size), nil)
		})
	}
	return errNoElements
}

// AuxLossForward: The load-balancing loss of a mixture of experts: aux_loss[0] = alpha N sum f_i P_i, of the share f_i of the indices that name expert i, and the mean
// P_i of its probabilities. router_probs is [batch_seq, n_experts], expert_indices [batch_seq, top_k]; f_counts[i] is how often expert i was
// chosen, p_means[i] is P_i. n_experts is at most 8192. It needs the form with _ws wherever there are experts, tokens and a top_k above 0.
// Slices that are too short are refused.
func AuxLossForward[T Float](routerProbs []T, expertIndices []int32, auxLoss []float32, fCounts []float32, pMeans []float32, batchSeq int32, nExperts int32, topK int32, alpha float32) error {
	if err := checkSizes("cuda_aux_loss_forward"+suffix[T](), []uint64{1, 1, 1, 1, 1, uint64(batchSeq), uint64(nExperts), uint64(topK), uint64(math.Float32bits(alpha))}, []extent{{"routerProbs", sizeOf(routerProbs)}, {"expertIndices", sizeOf(expertIndices)}, {"auxLoss", sizeOf(auxLoss)}, {"fCounts", sizeOf(fCounts)}, {"pMeans", sizeOf(pMeans)}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_aux_loss_forward_workspace_size(C.int(batchSeq), C.int(nExperts), C.int(topK), C.float(alpha), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_aux_loss_forward_ws((*C.float)(address(routerProbs)), (*C.int32_t)(address(expertIndices)), (*C.float)(address(auxLoss)), (*C.float)(address(fCounts)), (*C.float)(address(pMeans)), C.int(batchSeq), C.int(nExperts), C.int(topK), C.float(alpha), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_aux_loss_forward_bf16_workspace_size(C.int(batchSeq), C.int(nExperts), C.int(topK), C.float(alpha), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_aux_loss_forward_bf16_ws((*C.vmk_bf16)(address(routerProbs)), (*C.int32_t)(address(expertIndices)), (*C.float)(address(auxLoss)), (*C.float)(address(fCounts)), (*C.float)(address(pMeans)), C.int(batchSeq), C.int(nExperts), C.int(topK), C.float(alpha), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_aux_loss_forward_f16_workspace_size(C.int(batchSeq), C.int(nExperts), C.int(topK), C.float(alpha), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_aux_loss_forward_f16_ws((*C.vmk_f16)(address(routerProbs)), (*C.int32_t)(address(expertIndices)), (*C.float)(address(auxLoss)), (*C.float)(address(fCounts)), (*C.float)(address(pMeans)), C.int(batchSeq), C.int(nExperts), C.int(topK), C.float(alpha), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// Silu: output[i] = input[i] / (1 + exp(-input[i])).
// Slices that are too short are refused.
func Silu[T Float](input []T, output []T, n int64) error {
	if err := checkSizes("cuda_silu"+suffix[T](), []uint64{1, 1, uint64(n)}, []extent{{"input", sizeOf(input)}, {"output", sizeOf(output)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_silu((*C.float)(address(input)), (*C.float)(address(output)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_silu_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(output)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_silu_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(output)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// Add: output[i] = a[i] + b[i].
// Slices that are too short are refused.
func Add[T Float](a []T, b []T, output []T, n int64) error {
	if err := checkSizes("cuda_add"+suffix[T](), []uint64{1, 1, 1, uint64(n)}, []extent{{"a", sizeOf(a)}, {"b", sizeOf(b)}, {"output", sizeOf(output)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_add((*C.float)(address(a)), (*C.float)(address(b)), (*C.float)(address(output)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_add_bf16((*C.vmk_bf16)(address(a)), (*C.vmk_bf16)(address(b)), (*C.vmk_bf16)(address(output)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_add_f16((*C.vmk_f16)(address(a)), (*C.vmk_f16)(address(b)), (*C.vmk_f16)(address(output)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// Mul: output[i] = a[i] b[i].
// Slices that are too short are refused.
func Mul[T Float](a []T, b []T, output []T, n int64) error {
	if err := checkSizes("cuda_mul"+suffix[T](), []uint64{1, 1, 1, uint64(n)}, []extent{{"a", sizeOf(a)}, {"b", sizeOf(b)}, {"output", sizeOf(output)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_mul((*C.float)(address(a)), (*C.float)(address(b)), (*C.float)(address(output)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_mul_bf16((*C.vmk_bf16)(address(a)), (*C.vmk_bf16)(address(b)), (*C.vmk_bf16)(address(output)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_mul_f16((*C.vmk_f16)(address(a)), (*C.vmk_f16)(address(b)), (*C.vmk_f16)(address(output)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// Scale: output[i] = scale input[i].
// Slices that are too short are refused.
func Scale[T Float](input []T, output []T, scale float32, n int64) error {
	if err := checkSizes("cuda_scale"+suffix[T](), []uint64{1, 1, uint64(math.Float32bits(scale)), uint64(n)}, []extent{{"input", sizeOf(input)}, {"output", sizeOf(output)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_scale((*C.float)(address(input)), (*C.float)(address(output)), C.float(scale), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_scale_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(output)), C.float(scale), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_scale_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(output)), C.float(scale), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// Gelu: output[i] = input[i] (1 + erf(input[i] / sqrt(2))) / 2.
// Slices that are too short are refused.
func Gelu[T Float](input []T, output []T, n int64) error {
	if err := checkSizes("cuda_gelu"+suffix[T](), []uint64{1, 1, uint64(n)}, []extent{{"input", sizeOf(input)}, {"output", sizeOf(output)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu((*C.float)(address(input)), (*C.float)(address(output)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(output)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(output)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// GeluTanh: output[i] = input[i] (1 + tanh(sqrt(2 / pi) (input[i] + 0.044715 input[i]^3))) / 2, which is near to cuda_gelu.
// Slices that are too short are refused.
func GeluTanh[T Float](input []T, output []T, n int64) error {
	if err := checkSizes("cuda_gelu_tanh"+suffix[T](), []uint64{1, 1, uint64(n)}, []extent{{"input", sizeOf(input)}, {"output", sizeOf(output)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_tanh((*C.float)(address(input)), (*C.float)(address(output)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_tanh_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(output)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_tanh_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(output)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// SiluBackward: The gradient of cuda_silu: dinput[i] = doutput[i] silu'(input[i]).
// Slices that are too short are refused.
func SiluBackward[T Float](doutput []T, input []T, dinput []T, n int64) error {
	if err := checkSizes("cuda_silu_backward"+suffix[T](), []uint64{1, 1, 1, uint64(n)}, []extent{{"doutput", sizeOf(doutput)}, {"input", sizeOf(input)}, {"dinput", sizeOf(dinput)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_silu_backward((*C.float)(address(doutput)), (*C.float)(address(input)), (*C.float)(address(dinput)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_silu_backward_bf16((*C.vmk_bf16)(address(doutput)), (*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(dinput)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_silu_backward_f16((*C.vmk_f16)(address(doutput)), (*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(dinput)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// GeluBackward: The gradient of cuda_gelu, likewise.
// Slices that are too short are refused.
func GeluBackward[T Float](doutput []T, input []T, dinput []T, n int64) error {
	if err := checkSizes("cuda_gelu_backward"+suffix[T](), []uint64{1, 1, 1, uint64(n)}, []extent{{"doutput", sizeOf(doutput)}, {"input", sizeOf(input)}, {"dinput", sizeOf(dinput)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_backward((*C.float)(address(doutput)), (*C.float)(address(input)), (*C.float)(address(dinput)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_backward_bf16((*C.vmk_bf16)(address(doutput)), (*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(dinput)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_backward_f16((*C.vmk_f16)(address(doutput)), (*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(dinput)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// GeluTanhBackward: The gradient of cuda_gelu_tanh, likewise.
// Slices that are too short are refused.
func GeluTanhBackward[T Float](doutput []T, input []T, dinput []T, n int64) error {
	if err := checkSizes("cuda_gelu_tanh_backward"+suffix[T](), []uint64{1, 1, 1, uint64(n)}, []extent{{"doutput", sizeOf(doutput)}, {"input", sizeOf(input)}, {"dinput", sizeOf(dinput)}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_tanh_backward((*C.float)(address(doutput)), (*C.float)(address(input)), (*C.float)(address(dinput)), C.int64_t(n), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_tanh_backward_bf16((*C.vmk_bf16)(address(doutput)), (*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(dinput)), C.int64_t(n), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_gelu_tanh_backward_f16((*C.vmk_f16)(address(doutput)), (*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(dinput)), C.int64_t(n), nil)
		})
	}
	return errNoElements
}

// Softmax: The softmax of each row of input, [batch, dim].
// Slices that are too short are refused.
func Softmax[T Float](input []T, output []T, batch int32, dim int32) error {
	if err := checkSizes("cuda_softmax"+suffix[T](), []uint64{1, 1, uint64(batch), uint64(dim)}, []extent{{"input", sizeOf(input)}, {"output", sizeOf(output)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_softmax((*C.float)(address(input)), (*C.float)(address(output)), C.int(batch), C.int(dim), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_softmax_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(output)), C.int(batch), C.int(dim), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_softmax_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(output)), C.int(batch), C.int(dim), nil)
		})
	}
	return errNoElements
}

// Rmsnorm: Each row of input, [batch, dim], divided by the root of the mean of its squares and eps, times weight, [dim].
// Slices that are too short are refused.
func Rmsnorm[T Float](input []T, weight []T, output []T, batch int32, dim int32, eps float32) error {
	if err := checkSizes("cuda_rmsnorm"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(dim), uint64(math.Float32bits(eps))}, []extent{{"input", sizeOf(input)}, {"weight", sizeOf(weight)}, {"output", sizeOf(output)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_rmsnorm((*C.float)(address(input)), (*C.float)(address(weight)), (*C.float)(address(output)), C.int(batch), C.int(dim), C.float(eps), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_rmsnorm_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(weight)), (*C.vmk_bf16)(address(output)), C.int(batch), C.int(dim), C.float(eps), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_rmsnorm_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(weight)), (*C.vmk_f16)(address(output)), C.int(batch), C.int(dim), C.float(eps), nil)
		})
	}
	return errNoElements
}

// Layernorm: Each row of input, [batch, dim], less its mean, divided by the root of its variance and eps, times weight, plus bias, both [dim]. mean and rstd,
// [batch], are NULL, or get the mean and the reciprocal of that root, which cuda_layernorm_backward needs; both or neither.
// Slices that are too short are refused.
func Layernorm[T Float](input []T, weight []T, bias []T, output []T, mean []float32, rstd []float32, batch int32, dim int32, eps float32) error {
	if err := checkSizes("cuda_layernorm"+suffix[T](), []uint64{1, 1, 1, 1, given(mean), given(rstd), uint64(batch), uint64(dim), uint64(math.Float32bits(eps))}, []extent{{"input", sizeOf(input)}, {"weight", sizeOf(weight)}, {"bias", sizeOf(bias)}, {"output", sizeOf(output)}, {"mean", sizeOf(mean)}, {"rstd", sizeOf(rstd)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_layernorm((*C.float)(address(input)), (*C.float)(address(weight)), (*C.float)(address(bias)), (*C.float)(address(output)), (*C.float)(address(mean)), (*C.float)(address(rstd)), C.int(batch), C.int(dim), C.float(eps), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_layernorm_bf16((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(weight)), (*C.vmk_bf16)(address(bias)), (*C.vmk_bf16)(address(output)), (*C.float)(address(mean)), (*C.float)(address(rstd)), C.int(batch), C.int(dim), C.float(eps), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_layernorm_f16((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(weight)), (*C.vmk_f16)(address(bias)), (*C.vmk_f16)(address(output)), (*C.float)(address(mean)), (*C.float)(address(rstd)), C.int(batch), C.int(dim), C.float(eps), nil)
		})
	}
	return errNoElements
}

// LayernormBackward: The gradients of a layer norm from doutput, that of its output, [batch, dim]: dinput, [batch, dim], and dweight and dbias, [dim]. input, weight, mean and
// rstd are those of cuda_layernorm. cuda_layernorm_backward_workspace_size tells whether the form with _ws is needed.
// Slices that are too short are refused.
func LayernormBackward[T Float](input []T, weight []T, doutput []T, mean []float32, rstd []float32, dinput []T, dweight []T, dbias []T, batch int32, dim int32) error {
	if err := checkSizes("cuda_layernorm_backward"+suffix[T](), []uint64{1, 1, 1, 1, 1, 1, 1, 1, uint64(batch), uint64(dim)}, []extent{{"input", sizeOf(input)}, {"weight", sizeOf(weight)}, {"doutput", sizeOf(doutput)}, {"mean", sizeOf(mean)}, {"rstd", sizeOf(rstd)}, {"dinput", sizeOf(dinput)}, {"dweight", sizeOf(dweight)}, {"dbias", sizeOf(dbias)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_layernorm_backward_workspace_size(C.int(batch), C.int(dim), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_layernorm_backward_ws((*C.float)(address(input)), (*C.float)(address(weight)), (*C.float)(address(doutput)), (*C.float)(address(mean)), (*C.float)(address(rstd)), (*C.float)(address(dinput)), (*C.float)(address(dweight)), (*C.float)(address(dbias)), C.int(batch), C.int(dim), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_layernorm_backward_bf16_workspace_size(C.int(batch), C.int(dim), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_layernorm_backward_bf16_ws((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(weight)), (*C.vmk_bf16)(address(doutput)), (*C.float)(address(mean)), (*C.float)(address(rstd)), (*C.vmk_bf16)(address(dinput)), (*C.vmk_bf16)(address(dweight)), (*C.vmk_bf16)(address(dbias)), C.int(batch), C.int(dim), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_layernorm_backward_f16_workspace_size(C.int(batch), C.int(dim), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_layernorm_backward_f16_ws((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(weight)), (*C.vmk_f16)(address(doutput)), (*C.float)(address(mean)), (*C.float)(address(rstd)), (*C.vmk_f16)(address(dinput)), (*C.vmk_f16)(address(dweight)), (*C.vmk_f16)(address(dbias)), C.int(batch), C.int(dim), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// Topk: The k greatest of each row of input, [batch, dim], the greatest first, in values, [batch, k], and where they are in indices, [batch, k]. Of equal ones
// the first counts as greater, and NaN as greater than all. k is at most dim, dim at most 8388608 (2^23). Up to a dim of 1024 it needs no memory
// to work in; above, cuda_topk_workspace_size tells whether the form with _ws is needed.
// Slices that are too short are refused.
func Topk[T Float](input []T, values []T, indices []int32, batch int32, dim int32, k int32) error {
	if err := checkSizes("cuda_topk"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(dim), uint64(k)}, []extent{{"input", sizeOf(input)}, {"values", sizeOf(values)}, {"indices", sizeOf(indices)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topk_workspace_size(C.int(batch), C.int(dim), C.int(k), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topk_ws((*C.float)(address(input)), (*C.float)(address(values)), (*C.int32_t)(address(indices)), C.int(batch), C.int(dim), C.int(k), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topk_bf16_workspace_size(C.int(batch), C.int(dim), C.int(k), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topk_bf16_ws((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(values)), (*C.int32_t)(address(indices)), C.int(batch), C.int(dim), C.int(k), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topk_f16_workspace_size(C.int(batch), C.int(dim), C.int(k), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topk_f16_ws((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(values)), (*C.int32_t)(address(indices)), C.int(batch), C.int(dim), C.int(k), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// SoftmaxTopk: The softmax of each row of input, [rows, cols], of which the k greatest are kept: weights and indices, [rows, k]. k is at most cols, cols at most
// 8388608 (2^23). Above a cols of 1024 the form with _ws is needed.
// Slices that are too short are refused.
func SoftmaxTopk[T Float](input []T, weights []T, indices []int32, rows int32, cols int32, k int32) error {
	if err := checkSizes("cuda_softmax_topk"+suffix[T](), []uint64{1, 1, 1, uint64(rows), uint64(cols), uint64(k)}, []extent{{"input", sizeOf(input)}, {"weights", sizeOf(weights)}, {"indices", sizeOf(indices)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_softmax_topk_workspace_size(C.int(rows), C.int(cols), C.int(k), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_softmax_topk_ws((*C.float)(address(input)), (*C.float)(address(weights)), (*C.int32_t)(address(indices)), C.int(rows), C.int(cols), C.int(k), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_softmax_topk_bf16_workspace_size(C.int(rows), C.int(cols), C.int(k), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_softmax_topk_bf16_ws((*C.vmk_bf16)(address(input)), (*C.vmk_bf16)(address(weights)), (*C.int32_t)(address(indices)), C.int(rows), C.int(cols), C.int(k), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_softmax_topk_f16_workspace_size(C.int(rows), C.int(cols), C.int(k), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_softmax_topk_f16_ws((*C.vmk_f16)(address(input)), (*C.vmk_f16)(address(weights)), (*C.int32_t)(address(indices)), C.int(rows), C.int(cols), C.int(k), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// CrossEntropyForward: The cross-entropy of each row of logits, [batch, vocab_size], with its target: loss, [batch], and if log_probs is not NULL the logarithms of the
// softmax, [batch, vocab_size]. Rows whose target is -100 are ignored: their loss is 0. One that is otherwise below 0 or not below vocab_size makes
// the row's loss NaN. vocab_size is at least 1, if there are rows. No memory to work in is needed.
// Slices that are too short are refused.
func CrossEntropyForward[T Float](logits []T, targets []int32, loss []float32, logProbs []float32, batch int32, vocabSize int32) error {
	if err := checkSizes("cuda_cross_entropy_forward"+suffix[T](), []uint64{1, 1, 1, given(logProbs), uint64(batch), uint64(vocabSize)}, []extent{{"logits", sizeOf(logits)}, {"targets", sizeOf(targets)}, {"loss", sizeOf(loss)}, {"logProbs", sizeOf(logProbs)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_cross_entropy_forward_workspace_size(C.int(batch), C.int(vocabSize), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_cross_entropy_forward_ws((*C.float)(address(logits)), (*C.int32_t)(address(targets)), (*C.float)(address(loss)), (*C.float)(address(logProbs)), C.int(batch), C.int(vocabSize), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_cross_entropy_forward_bf16_workspace_size(C.int(batch), C.int(vocabSize), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_cross_entropy_forward_bf16_ws((*C.vmk_bf16)(address(logits)), (*C.int32_t)(address(targets)), (*C.float)(address(loss)), (*C.float)(address(logProbs)), C.int(batch), C.int(vocabSize), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_cross_entropy_forward_f16_workspace_size(C.int(batch), C.int(vocabSize), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_cross_entropy_forward_f16_ws((*C.vmk_f16)(address(logits)), (*C.int32_t)(address(targets)), (*C.float)(address(loss)), (*C.float)(address(logProbs)), C.int(batch), C.int(vocabSize), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// CrossEntropyBackward: The gradient of cuda_cross_entropy_forward: dlogits, [batch, vocab_size], is dloss[i] (softmax(logits[i, :]) less 1 at the target), and 0 in rows that
// are ignored. dloss, [batch], is the gradient of each row's loss: 1 / batch for that of their mean.
// Slices that are too short are refused.
func CrossEntropyBackward[T Float](logits []T, targets []int32, dloss []float32, dlogits []T, batch int32, vocabSize int32) error {
	if err := checkSizes("cuda_cross_entropy_backward"+suffix[T](), []uint64{1, 1, 1, 1, uint64(batch), uint64(vocabSize)}, []extent{{"logits", sizeOf(logits)}, {"targets", sizeOf(targets)}, {"dloss", sizeOf(dloss)}, {"dlogits", sizeOf(dlogits)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		return callKernel(func() C.vmk_status {
			return C.cuda_cross_entropy_backward((*C.float)(address(logits)), (*C.int32_t)(address(targets)), (*C.float)(address(dloss)), (*C.float)(address(dlogits)), C.int(batch), C.int(vocabSize), nil)
		})
	case BF16:
		return callKernel(func() C.vmk_status {
			return C.cuda_cross_entropy_backward_bf16((*C.vmk_bf16)(address(logits)), (*C.int32_t)(address(targets)), (*C.float)(address(dloss)), (*C.vmk_bf16)(address(dlogits)), C.int(batch), C.int(vocabSize), nil)
		})
	case F16:
		return callKernel(func() C.vmk_status {
			return C.cuda_cross_entropy_backward_f16((*C.vmk_f16)(address(logits)), (*C.int32_t)(address(targets)), (*C.float)(address(dloss)), (*C.vmk_f16)(address(dlogits)), C.int(batch), C.int(vocabSize), nil)
		})
	}
	return errNoElements
}

// Argmax: The place of the greatest of each row of logits, [batch, vocab_size]; of equal ones the first. vocab_size is 1 to 8388608 (2^23). Up to a vocab_size
// of 1024 it needs no memory to work in; above, cuda_argmax_workspace_size tells whether the form with _ws is needed.
// Slices that are too short are refused.
func Argmax[T Float](logits []T, output []int32, batch int32, vocabSize int32) error {
	if err := checkSizes("cuda_argmax"+suffix[T](), []uint64{1, 1, uint64(batch), uint64(vocabSize)}, []extent{{"logits", sizeOf(logits)}, {"output", sizeOf(output)}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_argmax_workspace_size(C.int(batch), C.int(vocabSize), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_argmax_ws((*C.float)(address(logits)), (*C.int32_t)(address(output)), C.int(batch), C.int(vocabSize), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_argmax_bf16_workspace_size(C.int(batch), C.int(vocabSize), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_argmax_bf16_ws((*C.vmk_bf16)(address(logits)), (*C.int32_t)(address(output)), C.int(batch), C.int(vocabSize), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_argmax_f16_workspace_size(C.int(batch), C.int(vocabSize), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_argmax_f16_ws((*C.vmk_f16)(address(logits)), (*C.int32_t)(address(output)), C.int(batch), C.int(vocabSize), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// Sample: A place of each row of logits, [batch, vocab_size], drawn with the probability softmax(logits / temperature) by the row's seed; at temperature 0 the
// greatest. The same seed draws the same. vocab_size is 1 to 8388608 (2^23). Up to a vocab_size of 1024 it needs no memory to work in; above, the form
// with _ws is needed.
// Slices that are too short are refused.
func Sample[T Float](logits []T, output []int32, seeds []int64, batch int32, vocabSize int32, temperature float32) error {
	if err := checkSizes("cuda_sample"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(vocabSize), uint64(math.Float32bits(temperature))}, []extent{{"logits", sizeOf(logits)}, {"output", sizeOf(output)}, {"seeds", sizeOf(seeds)}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_sample_workspace_size(C.int(batch), C.int(vocabSize), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_sample_ws((*C.float)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_sample_bf16_workspace_size(C.int(batch), C.int(vocabSize), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_sample_bf16_ws((*C.vmk_bf16)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_sample_f16_workspace_size(C.int(batch), C.int(vocabSize), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_sample_f16_ws((*C.vmk_f16)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// TopkSample: The same of the k greatest alone, from 1; vocab_size, or more, are all. Up to a vocab_size of 1024 it needs no memory to work in; above,
// cuda_topk_sample_workspace_size tells whether the form with _ws is needed.
// Slices that are too short are refused.
func TopkSample[T Float](logits []T, output []int32, seeds []int64, batch int32, vocabSize int32, k int32, temperature float32) error {
	if err := checkSizes("cuda_topk_sample"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(vocabSize), uint64(k), uint64(math.Float32bits(temperature))}, []extent{{"logits", sizeOf(logits)}, {"output", sizeOf(output)}, {"seeds", sizeOf(seeds)}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topk_sample_workspace_size(C.int(batch), C.int(vocabSize), C.int(k), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topk_sample_ws((*C.float)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.int(k), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topk_sample_bf16_workspace_size(C.int(batch), C.int(vocabSize), C.int(k), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topk_sample_bf16_ws((*C.vmk_bf16)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.int(k), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topk_sample_f16_workspace_size(C.int(batch), C.int(vocabSize), C.int(k), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topk_sample_f16_ws((*C.vmk_f16)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.int(k), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}

// ToppSample: The same of the fewest greatest whose probabilities reach top_p, 0 to 1. Below a top_p of 1 the form with _ws is needed, if temperature is above 0.
// Slices that are too short are refused.
func ToppSample[T Float](logits []T, output []int32, seeds []int64, batch int32, vocabSize int32, topP float32, temperature float32) error {
	if err := checkSizes("cuda_topp_sample"+suffix[T](), []uint64{1, 1, 1, uint64(batch), uint64(vocabSize), uint64(math.Float32bits(topP)), uint64(math.Float32bits(temperature))}, []extent{{"logits", sizeOf(logits)}, {"output", sizeOf(output)}, {"seeds", sizeOf(seeds)}, {}, {}, {}, {}}); err != nil {
		return err
	}
	var t T
	switch any(t).(type) {
	case float32:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topp_sample_workspace_size(C.int(batch), C.int(vocabSize), C.float(topP), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topp_sample_ws((*C.float)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.float(topP), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	case BF16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topp_sample_bf16_workspace_size(C.int(batch), C.int(vocabSize), C.float(topP), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topp_sample_bf16_ws((*C.vmk_bf16)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.float(topP), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	case F16:
		space, err := workspace(func(bytes *C.size_t) C.vmk_status {
			return C.cuda_topp_sample_f16_workspace_size(C.int(batch), C.int(vocabSize), C.float(topP), C.float(temperature), bytes)
		})
		if err != nil {
			return err
		}
		return callKernel(func() C.vmk_status {
			return C.cuda_topp_sample_f16_ws((*C.vmk_f16)(address(logits)), (*C.int32_t)(address(output)), (*C.int64_t)(address(seeds)), C.int(batch), C.int(vocabSize), C.float(topP), C.float(temperature), address(space), C.size_t(8*len(space)), nil)
		})
	}
	return errNoElements
}
