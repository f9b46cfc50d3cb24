// Package bootstrap creates and deletes the tokens with which new nodes join the target
// cluster. Each machine has one. It is created when a driver fetches it and deleted when
// the node has joined.
//
// A token is a Secret of type bootstrap.kubernetes.io/token in kube-system, as kubeadm
// makes them (Kubernetes documentation, "Authenticating with Bootstrap Tokens"). The
// driver that fetched the token puts it into user data.
package bootstrap
