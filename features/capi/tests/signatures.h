/* The signatures of the specification, of f32; those of bf16 and f16 have a suffix and uint16_t for T.
 * Where a line begins with f32 there are none. */
int32_t cuda_gemm(const T *A, const T *B, T *C, int M, int N, int K, float alpha, float beta, void *stream);
int32_t cuda_gemm_batched(const T *A, const T *B, T *C, int batch, int M, int N, int K, float alpha, float beta, void *stream);
int32_t cuda_mqa_attention(const T *Q, const T *K, const T *V, T *output, const float *mask, int batch, int seq_len, int n_heads, int head_dim, float scale, void *stream);
int32_t cuda_flash_attention(const T *Q, const T *K, const T *V, T *output, int batch, int seq_len, int n_heads, int head_dim, float scale, int is_causal, void *stream);
int32_t cuda_rope(T *q, T *k, const float *freqs, int batch, int seq_len, int n_heads, int head_dim, void *stream);
int32_t cuda_adamw_step(T *param, const T *grad, float *m, float *v, float lr, float beta1, float beta2, float eps, float weight_decay, int step, int64_t size, void *stream);
int32_t cuda_grad_clip(T *grad, float *partial_norms, float *total_norm, float clip_norm, int64_t size, void *stream);
f32 cuda_scatter_add(const float *input, const int32_t *indices, float *output, int64_t count, int64_t dim, int64_t rows, void *stream);
int32_t cuda_zero_grad(T *grad, int64_t size, void *stream);
f32 cuda_aux_loss_forward(const float *router_probs, const int32_t *expert_indices, float *aux_loss, float *f_counts, float *p_means, int batch_seq, int n_experts, int top_k, float alpha, void *stream);
int32_t cuda_silu(const T *input, T *output, int64_t n, void *stream);
int32_t cuda_add(const T *a, const T *b, T *output, int64_t n, void *stream);
int32_t cuda_mul(const T *a, const T *b, T *output, int64_t n, void *stream);
int32_t cuda_scale(const T *input, T *output, float scale, int64_t n, void *stream);
int32_t cuda_softmax(const T *input, T *output, int batch, int dim, void *stream);
int32_t cuda_rmsnorm(const T *input, const T *weight, T *output, int batch, int dim, float eps, void *stream);
int32_t cuda_topk(const T *input, T *values, int32_t *indices, int batch, int dim, int k, void *stream);
int32_t cuda_softmax_topk(const T *input, T *weights, int32_t *indices, int rows, int cols, int k, void *stream);
int32_t cuda_cross_entropy_forward(const T *logits, const int32_t *targets, float *loss, float *log_probs, int batch, int vocab_size, void *stream);
int32_t cuda_argmax(const T *logits, int32_t *output, int batch, int vocab_size, void *stream);
int32_t cuda_sample(const T *logits, int32_t *output, const int64_t *seeds, int batch, int vocab_size, float temperature, void *stream);
int32_t cuda_topk_sample(const T *logits, int32_t *output, const int64_t *seeds, int batch, int vocab_size, int k, float temperature, void *stream);
int32_t cuda_topp_sample(const T *logits, int32_t *output, const int64_t *seeds, int batch, int vocab_size, float top_p, float temperature, void *stream);
