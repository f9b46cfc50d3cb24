// Package bootstrap keeps the tokens with which new nodes ask to join the target
// cluster: one for each machine, made when a driver needs it and removed when the
// node is there.
//
// Kubernetes accepts them as it accepts those of kubeadm: they are Secrets of type
// bootstrap.kubernetes.io/token in kube-system (Kubernetes documentation,
// "Authenticating with Bootstrap Tokens"). Putting a token into user data is not
// done here but in the driver that fetched it.
package bootstrap
